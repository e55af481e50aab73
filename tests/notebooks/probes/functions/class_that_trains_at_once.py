# expect: converted
# has: class Run
# cause: the constructor of a class trains
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
class Run:
    def __init__(self, name, rows):
        self.trainer = SFTTrainer(name, train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
        self.trainer.train()
rows = load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"] + r["a"]})
run = Run("Qwen/Qwen2.5-0.5B", rows)
run.trainer.save_model("final")
