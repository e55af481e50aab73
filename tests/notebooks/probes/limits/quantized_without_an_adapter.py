# expect: refused R4
# says: adapter
# cause: a model in 8 bits without an adapter cannot be trained
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", quantization_config=BitsAndBytesConfig(load_in_8bit=True))
ds = load_dataset("trl-lib/Capybara", split="train")
SFTTrainer(model=model, train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=5)).train()
