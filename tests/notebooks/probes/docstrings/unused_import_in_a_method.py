# expect: converted
# has: import math
# cause: a method of the notebook's imports a module that it does not use
# %%
import math
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class Run:
    def __init__(self, name):
        self.tok = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name)
    def fit(self, rows, steps):
        import math
        import os, json
        self.trainer = SFTTrainer(model=self.model, processing_class=self.tok, train_dataset=rows, peft_config=LoraConfig(r=8),
                                  args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=steps))
        self.trainer.train()
        print(json.dumps({"done": True}))
ds = load_dataset("acme/t", split="train").map(lambda row: {"text": row["q"] + row["a"]})
# %%
run = Run("Qwen/Qwen2.5-0.5B")
run.fit(ds, 12)
print(math.pi)
