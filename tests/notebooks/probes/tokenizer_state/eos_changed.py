# expect: converted
# has: eos_token = "<|im_end|>"
# cause: the EOS token is changed before the data; the trainer gets it by its configuration
# %%
from transformers import AutoTokenizer, AutoModelForCausalLM
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
tok.eos_token = "<|im_end|>"
tok.pad_token = "<|endoftext|>"
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
model.config.eos_token_id = tok.eos_token_id
model.generation_config.eos_token_id = tok.eos_token_id
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"] + tok.eos_token})
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer(model, train_dataset=ds, processing_class=tok, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", eos_token="<|im_end|>")).train()
