# expect: converted
# cause: LoraConfig.from_pretrained after the training is about the saved adapter
# fast
# %%
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]))
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model, train_dataset=ds, args=SFTConfig(output_dir="outputs", dataset_text_field="text")).train()
model.save_pretrained("outputs")
# %%
lora_config = LoraConfig.from_pretrained('outputs')
model = get_peft_model(base, lora_config)
print(model)
