# expect: converted
# cause: a LoraConfig for the next experiment is defined after the training
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
name = "NousResearch/Llama-2-7b-hf"
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16, load_in_8bit=True)
ds = load_dataset("timdettmers/openassistant-guanaco", split="train")
peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM")
trainer = SFTTrainer(model=model, train_dataset=ds, dataset_text_field="text", max_seq_length=512, tokenizer=tokenizer,
                     peft_config=peft_config, args=TrainingArguments(output_dir="guanaco", max_steps=500, learning_rate=1e-4))
trainer.train()
trainer.model.save_pretrained("guanaco-adapter")
# %%
peft_config = LoraConfig(r=2, lora_alpha=2)
print(peft_config)
# %%
base = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16, device_map={"": 0})
merged = PeftModel.from_pretrained(base, "guanaco-adapter").merge_and_unload()
merged.save_pretrained("guanaco-merged")
