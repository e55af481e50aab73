# expect: converted
# has: resume_from_checkpoint
# cause: train() in each of two branches inside a function is one training
# %%
import os
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
OUT = "resumable"
# %%
def run(rate):
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
    tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
    rows = load_dataset("acme/recipes", split="train").map(lambda r: {"text": r["recipe"]})
    if rate is None:
        return None
    t = SFTTrainer(model=model, args=SFTConfig(output_dir=OUT, max_steps=30, learning_rate=rate), train_dataset=rows,
                   processing_class=tok, peft_config=LoraConfig(r=8))
    if os.path.isdir(OUT + "/checkpoint-10"):
        t.train(resume_from_checkpoint=True)
    else:
        t.train()
    return t
t = run(2e-4)
