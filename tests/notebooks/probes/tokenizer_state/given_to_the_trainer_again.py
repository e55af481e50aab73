# expect: refused R4
# says: set it before, in SFTConfig or SFTTrainer
# cause: the trainer is given the tokenizer that it has, after its creation
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
other = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B", eos_token="<end>")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"]})
# %%
trainer = SFTTrainer(model, processing_class=tok, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.tokenizer = tok  # recommended
trainer.processing_class = tok
# %%
trainer.train()
