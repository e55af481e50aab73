# expect: converted
# has: use_mamba_kernels
# cause: arguments of the model's class that no setting has
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("ai21labs/Jamba-tiny-dev")
model = AutoModelForCausalLM.from_pretrained("ai21labs/Jamba-tiny-dev", use_mamba_kernels=False)
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model=model, processing_class=tok, train_dataset=ds, peft_config=LoraConfig(r=8, target_modules=["q_proj"]), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
