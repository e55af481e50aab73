# expect: converted
# has: generate(
# cause: a callback samples answers during the training; its method has the name of the model's
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
ids = tok("The capital of France is", return_tensors="pt")
print(tok.decode(model.generate(**ids, max_new_tokens=5)[0]))
ds = load_dataset("acme/clues", split="train").map(lambda r: {"text": r["word"] + ": " + r["clue"]})
# %%
class Sampler(TrainerCallback):
    def __init__(self, owner, prompts):
        self.owner, self.prompts = owner, prompts
    def generate(self, prompt):
        enc = tok(prompt, return_tensors="pt").to(self.owner.model.device)
        return tok.decode(self.owner.model.generate(**enc, max_new_tokens=20)[0])
    def on_epoch_end(self, args, state, control, **kwargs):
        for prompt in self.prompts:
            print(self.generate(prompt))
trainer = SFTTrainer(model=model, processing_class=tok, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.add_callback(Sampler(trainer, ["cat:"]))
trainer.train()
merged = trainer.model.merge_and_unload()
merged.save_pretrained("merged")
