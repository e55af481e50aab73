# expect: converted
# has: run.train(ds, steps=12)
# cause: the notebook's own class has a method train(), which is called at the top level
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class Run:
    def __init__(self, name):
        self.tok = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name)
    def train(self, rows, steps):
        self.trainer = SFTTrainer(model=self.model, processing_class=self.tok, train_dataset=rows, peft_config=LoraConfig(r=8),
                                  args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=steps))
        self.trainer.train()
        self.trainer.save_model("o/final")
ds = load_dataset("acme/t", split="train").map(lambda row: {"text": row["q"] + row["a"]})
# %%
run = Run("Qwen/Qwen2.5-0.5B")
run.train(ds, steps=12)
