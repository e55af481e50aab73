# expect: converted
# hasnot: .to(DEVICE)
# hasnot: .to(device)
# cause: `if DEVICE != "cpu": model.to(DEVICE)`
# fast
# %%
import torch
if torch.cuda.is_available():
    DEVICE = "cuda"
elif torch.backends.mps.is_available():
    DEVICE = "mps"
else:
    DEVICE = "cpu"
print("Using", DEVICE)
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
if DEVICE != "cpu":
    model.to(DEVICE)
tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M")
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, args=SFTConfig(output_dir="o", dataset_text_field="text", use_mps_device=True if DEVICE == "mps" else False))
trainer.train()
