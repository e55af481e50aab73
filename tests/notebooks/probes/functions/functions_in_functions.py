# expect: converted
# has: max_steps=21
# cause: the function that trains is called by another
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SETTINGS = {"name": "Qwen/Qwen2.5-0.5B", "seeds": [0]}
def fit(rows, seed):
    tok = AutoTokenizer.from_pretrained(SETTINGS["name"])
    if tok.pad_token is None:
        tok.pad_token = tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(SETTINGS["name"])
    tr = SFTTrainer(model=model, processing_class=tok, train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="fit", dataset_text_field="text", seed=seed, max_steps=21))
    tr.train()
    return tr
def experiment(name, seed=7):
    rows = load_dataset(name, split="train").map(lambda r: {"text": r["q"] + r["a"]})
    return fit(rows, seed)
# %%
experiment("acme/t")
