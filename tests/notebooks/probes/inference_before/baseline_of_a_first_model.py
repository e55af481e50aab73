# expect: converted
# hasnot: rouge
# hasnot: score(
# cause: a function scores a first copy of the base model; the model that is trained is loaded afterwards
# %%
import torch, pandas as pd
from datasets import load_dataset
from evaluate import load
from tqdm import tqdm
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from trl import SFTConfig, SFTTrainer
name = "facebook/opt-350m"
tok = AutoTokenizer.from_pretrained(name)
tok.pad_token = tok.eos_token
first = AutoModelForCausalLM.from_pretrained(name, device_map="auto")
test = load_dataset("acme/finance", split="train").to_pandas().iloc[1000:1100]
# %%
def score(net, tok, prompts, references, size=4):
    rouge = load("rouge")
    rows = []
    for start in tqdm(range(0, len(prompts), size)):
        enc = tok(prompts[start:start + size], return_tensors="pt", padding=True).to(net.device)
        with torch.no_grad():
            out = net.generate(**enc, max_new_tokens=32)
        for text, wanted in zip(tok.batch_decode(out), references[start:start + size]):
            rouge.add(prediction=text, reference=wanted)
            rows.append({"text": text, "wanted": wanted})
    return rouge.compute(), pd.DataFrame(rows)
scores, table = score(first, tok, list(test["instruction"]), list(test["output"]))
for key, value in scores.items():
    print(f"{key}: {value:.3f}")
table
# %%
base = AutoModelForCausalLM.from_pretrained(name, device_map="auto", use_cache=False)
rows = load_dataset("acme/finance", split="train").select(range(1000)).map(lambda r: {"text": r["instruction"] + r["output"]})
trainer = SFTTrainer(model=base, train_dataset=rows, peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"]), args=SFTConfig(output_dir="o"), data_collator=DataCollatorForLanguageModeling(tok, mlm=False))
trainer.train()
