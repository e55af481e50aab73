# expect: refused R4
# says: an older adapter of the model must be merged before
# cause: a second adapter beside an older one
# %%
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# %%
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})
# %%
model = PeftModel.from_pretrained(base, "older", adapter_name="older")
model.add_adapter("new", LoraConfig(r=8, target_modules=["q_proj"]))
model.set_adapter("new")
# %%
args = SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model("final")
