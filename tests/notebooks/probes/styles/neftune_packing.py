# expect: converted
# cause: NEFTune and packing as the trainer's own arguments
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
from peft import LoraConfig
t = AutoTokenizer.from_pretrained("mistralai/Mistral-7B-v0.1")
m = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", use_flash_attention_2=True, torch_dtype="auto")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(m, args=TrainingArguments("nef", max_steps=99, learning_rate=2e-5), train_dataset=ds, tokenizer=t, dataset_text_field="text", max_seq_length=2048, packing=True, neftune_noise_alpha=5, peft_config=LoraConfig(r=64)).train()
