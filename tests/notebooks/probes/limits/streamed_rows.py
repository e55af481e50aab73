# expect: refused R4
# cause: rows that are streamed to the trainer
# says: remove streaming=True
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B")
# %%
ds = load_dataset("trl-lib/Capybara", split="train", streaming=True).map(lambda row: {"text": str(row["messages"])})
args = SFTConfig(output_dir="o", max_steps=10)
trainer = SFTTrainer(model=model, args=args, train_dataset=ds, processing_class=tokenizer, peft_config=LoraConfig(r=8))
trainer.train()
