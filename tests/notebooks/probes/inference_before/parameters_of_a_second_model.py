# expect: converted
# hasnot: probe
# cause: parameters are counted on a second copy of the model with the same adapter, and results are stored in a dict
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
name = "EleutherAI/pythia-160m"
tok = AutoTokenizer.from_pretrained(name)
tok.add_special_tokens({"pad_token": "<pad>"})
results = {}
def summary(net, label):
    return {"label": label, "all": sum(p.numel() for p in net.parameters())}
lora = LoraConfig(r=8, target_modules=["query_key_value"], task_type="CAUSAL_LM")
base = AutoModelForCausalLM.from_pretrained(name)
base.resize_token_embeddings(len(tok))
# %%
probe = AutoModelForCausalLM.from_pretrained(name)
probe.resize_token_embeddings(len(tok))
if probe.config.pad_token_id is None:
    probe.config.pad_token_id = tok.pad_token_id
probe_lora = get_peft_model(probe, lora)
results["lora"] = summary(probe_lora, "check")
print(results)
# %%
model = get_peft_model(base, lora)
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model=model, processing_class=tok, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
