# expect: refused R1
# cause: a subclass with its own loss
# %%
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
class WeightedTrainer(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kw):
        out = model(**inputs)
        loss = out.loss * 0.5
        return (loss, out) if return_outputs else loss
WeightedTrainer("Qwen/Qwen2.5-0.5B", train_dataset=load_dataset("acme/t", split="train"), args=SFTConfig(output_dir="o")).train()
