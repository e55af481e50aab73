# expect: converted
# cause: `model = PeftModel.from_pretrained(model, ...)` replaces the name after the training
# %%
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-1.5B")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="run", dataset_text_field="text"))
trainer.train()
trainer.model.save_pretrained("adapter")
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B-Instruct")
model = PeftModel.from_pretrained(model, "adapter")
model.eval()
