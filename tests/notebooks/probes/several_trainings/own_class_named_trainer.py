# expect: converted
# has: class LanguageTrainer
# has: trainer.train()
# cause: a class of the notebook is named like a trainer, derives from none, and has a method train()
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class LanguageTrainer:
    def __init__(self, name, rows):
        self.tok = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name)
        self.rows = rows
    def build(self):
        self.trainer = SFTTrainer(model=self.model, processing_class=self.tok, train_dataset=self.rows, peft_config=LoraConfig(r=8),
                                  args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=12))
    def train(self):
        self.trainer.train()
        self.trainer.save_model("o/final")
# %%
ds = load_dataset("acme/t", split="train").map(lambda row: {"text": row["q"] + row["a"]})
trainer = LanguageTrainer("Qwen/Qwen2.5-0.5B", ds)
trainer.build()
# %%
trainer.train()
