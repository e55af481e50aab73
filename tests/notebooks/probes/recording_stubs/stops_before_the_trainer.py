# expect: refused R4
# cause: names that exist only at run time
# %%
from collections import Counter
from datasets import Dataset
from transformers import AutoModelForCausalLM
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
# %%
rows = Counter(5)["a"]
ds = Dataset.from_list([{"text": row} for row in rows])
# %%
args = SFTConfig(output_dir="o", max_steps=5)
trainer = SFTTrainer(model, train_dataset=ds, peft_config=LoraConfig(r=8), args=args, formatting_func=eval("str"))
trainer.train()
