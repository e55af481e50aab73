# expect: converted
# has: from finetune import SFTTrainer as Trainer
# has:         from finetune import SFTConfig as Config
# has:         from finetune import TrainingArguments as Config
# has: trainer = Trainer(
# has: args=Config(
# cause: the classes under other names, one of them chosen in a try by what the installed TRL has
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer as Trainer

try:
    from trl import SFTConfig as Config
except ImportError:
    from transformers import TrainingArguments as Config
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})
print("arguments are those of", Config.__name__)
# %%
trainer = Trainer(model=model, args=Config(output_dir="out", max_steps=20), train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model("final")
