# expect: refused R2
# says: run.train(ds, 0.0001)
# says: called more than once
# cause: the notebook's own train() trains, and is called twice
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class Run:
    def __init__(self, name):
        self.tok = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name)
    def train(self, rows, rate):
        self.trainer = SFTTrainer(model=self.model, processing_class=self.tok, train_dataset=rows, peft_config=LoraConfig(r=8),
                                  args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=12, learning_rate=rate))
        self.trainer.train()
ds = load_dataset("acme/t", split="train").map(lambda row: {"text": row["q"] + row["a"]})
# %%
run = Run("Qwen/Qwen2.5-0.5B")
run.train(ds, 1e-4)
run.train(ds, 1e-5)
