# expect: refused R1
# says: keep the cells up to the SFTTrainer
# cause: supervised fine-tuning and preference training in one notebook
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
sft = SFTTrainer(model=model, processing_class=tok, train_dataset=load_dataset("acme/t", split="train"), peft_config=LoraConfig(), args=SFTConfig(output_dir="sft"))
sft.train()
# %%
dpo = DPOTrainer(model=model, processing_class=tok, train_dataset=load_dataset("acme/pairs", split="train"), args=DPOConfig(output_dir="dpo"))
dpo.train()
