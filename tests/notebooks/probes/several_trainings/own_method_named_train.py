# expect: converted
# has: self.strategy.train(rows)
# has: max_steps=12
# cause: a class of the notebook has a method train(), which another class calls
# fast
# %%
from abc import ABC, abstractmethod
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class Strategy(ABC):
    @abstractmethod
    def train(self, rows):
        pass
# %%
class Lora(Strategy):
    def __init__(self, name):
        self.name = name
    def train(self, rows):
        self.tok = AutoTokenizer.from_pretrained(self.name)
        self.model = AutoModelForCausalLM.from_pretrained(self.name)
        trainer = SFTTrainer(model=self.model, processing_class=self.tok, train_dataset=rows, peft_config=LoraConfig(r=8),
                             args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=12))
        result = trainer.train()
        self.loss = result.training_loss
        self.model.eval()
        return self.model, self.tok
# %%
class Tuner:
    def __init__(self, strategy: Strategy):
        self.strategy = strategy
    def run(self, rows):
        return self.strategy.train(rows)
# %%
ds = load_dataset("acme/t", split="train").map(lambda row: {"text": row["q"] + row["a"]})
tuner = Tuner(Lora("Qwen/Qwen2.5-0.5B"))
model, tok = tuner.run(ds)
model.save_pretrained("o/final")
