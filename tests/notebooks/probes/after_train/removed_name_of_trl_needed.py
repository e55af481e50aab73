# expect: refused R4
# says: ConstantLengthDataset
# cause: the rows are packed by a class that TRL has no more
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl.trainer import ConstantLengthDataset
model = AutoModelForCausalLM.from_pretrained("acme/base")
tokenizer = AutoTokenizer.from_pretrained("acme/base")
rows = load_dataset("acme/t", split="train")
packed = ConstantLengthDataset(tokenizer, rows, formatting_func=lambda row: row["a"], seq_length=1024)
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=packed, peft_config=LoraConfig(r=8), args=SFTConfig("o"))
trainer.train()
