# expect: converted
# hasnot: rouge
# cause: a baseline score by generate in a loop before the training
# %%
import torch, evaluate
from tqdm.auto import tqdm
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
tok = AutoTokenizer.from_pretrained("EleutherAI/pythia-410m"); tok.pad_token = tok.eos_token
model = AutoModelForCausalLM.from_pretrained("EleutherAI/pythia-410m").to("cuda")
ds = load_dataset("acme/sum", split="train").map(lambda r: {"text": r["doc"] + "\nTL;DR: " + r["summary"]})
test = load_dataset("acme/sum", split="test").select(range(20))
# %%
rouge = evaluate.load("rouge")
preds = []
with torch.no_grad():
    for row in tqdm(test):
        enc = tok(row["doc"] + "\nTL;DR:", return_tensors="pt", truncation=True, max_length=900).to("cuda")
        preds.append(tok.decode(model.generate(**enc, max_new_tokens=60)[0][enc["input_ids"].shape[1]:]))
baseline = rouge.compute(predictions=preds, references=test["summary"])
print(baseline)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
trainer = SFTTrainer(model, train_dataset=ds, processing_class=tok, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
