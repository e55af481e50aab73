# expect: converted
# hasnot: wandb
# hasnot: Samples
# says: add_callback
# cause: a callback of the author's that logs to an account, on every rank
# %%
import wandb
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import WandbCallback
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
ds = load_dataset("acme/clues", split="train").map(lambda r: {"text": r["word"] + ": " + r["clue"]})
class Samples(WandbCallback):
    def __init__(self, trainer, prompts):
        super().__init__()
        self.trainer, self.prompts = trainer, prompts
    def on_evaluate(self, args, state, control, **kwargs):
        super().on_evaluate(args, state, control, **kwargs)
        self._wandb.log({"prompts": len(self.prompts)})
trainer = SFTTrainer(model=model, processing_class=tok, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
callback = Samples(trainer, ["cat:"])
trainer.add_callback(callback)
trainer.train()
