# expect: converted
# has: class FineTuner
# has: max_steps=12
# cause: a class holds model, data and trainer
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
class FineTuner:
    def __init__(self, name):
        self.tok = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name)
    def data(self, path):
        self.ds = load_dataset(path, split="train").map(self._render)
        return self
    def _render(self, row):
        return {"text": row["a"] + self.tok.eos_token}
    def fit(self, **kw):
        self.trainer = SFTTrainer(model=self.model, processing_class=self.tok, train_dataset=self.ds, peft_config=LoraConfig(r=8),
                                  args=SFTConfig(dataset_text_field="text", **kw))
        self.trainer.train()
        return self
# %%
ft = FineTuner("Qwen/Qwen2.5-0.5B").data("acme/t").fit(output_dir="cls", max_steps=12)
ft.trainer.save_model("cls/final")
