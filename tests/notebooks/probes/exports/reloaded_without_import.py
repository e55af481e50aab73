# expect: converted
# hasnot: merged_model
# cause: after the training, a cell uses a class that no cell imports, so the notebook ends there
# %%
import random
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("microsoft/phi-2", flash_rotary=True)
tok = AutoTokenizer.from_pretrained("microsoft/phi-2")
rows = load_dataset("acme/poems", split="train").map(lambda r: {"text": r["poem"]})
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o"), train_dataset=rows, processing_class=tok, peft_config=LoraConfig(r=8))
trainer.train()
trainer.model.save_pretrained("adapter")
# %%
base = AutoModelForCausalLM.from_pretrained("microsoft/phi-2")
merged = PeftModel.from_pretrained(base, "adapter")
merged = merged.merge_and_unload()
merged.save_pretrained("merged_model")
