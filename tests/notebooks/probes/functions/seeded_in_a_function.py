# expect: converted
# has: from transformers import set_seed
# hasnot: google.colab
# cause: set_seed imported and used only in a function, and a secret of Colab read in one
# %%
import os, random, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def setup(seed):
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    try:
        from google.colab import userdata
        key = userdata.get("HF_TOKEN")
    except ImportError:
        key = None
    random.seed(seed)
setup(11)
# %%
def pick(rows):
    return rows.select(random.sample(range(len(rows)), 64))
def build(rate):
    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
    tok = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M")
    rows = pick(load_dataset("acme/letters", split="train").map(lambda r: {"text": r["body"] + tok.eos_token}))
    args = SFTConfig(output_dir="letters", max_steps=20, learning_rate=rate)
    if rate > 1:
        return None
    t = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tok, peft_config=LoraConfig(r=8))
    t.train()
    return t
trained = build(1e-4)
