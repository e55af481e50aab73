# expect: converted
# has: .merge_and_unload()
# has: model = get_peft_model(model, LoraConfig(
# cause: the older one merged before, as the refusal advises
# %%
from datasets import load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# %%
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})
# %%
model = PeftModel.from_pretrained(base, "older").merge_and_unload()
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"]))
# %%
args = SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model("final")
