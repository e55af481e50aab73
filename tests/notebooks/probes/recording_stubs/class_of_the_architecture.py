# expect: converted
# has: LlamaForCausalLM.from_pretrained
# cause: the model is loaded with the class of its architecture
# %%
import torch
from datasets import load_dataset
from transformers import LlamaForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", torch_dtype=torch.bfloat16)
tok = AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-1B")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"]})
# %%
trainer = SFTTrainer(model, processing_class=tok, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
