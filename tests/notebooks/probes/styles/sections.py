# expect: converted
# has: # Load the model
# has: # 2. the model
# has: # Train
# hasnot: Before:
# has: print = PartialState().print  # once, on the main rank
# cause: headings and comments stay with their sections, and a heading of nothing is left out
# %% [markdown]
# # Load the model
# %%
# 2. the model
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
print("parameters:", model.num_parameters())
# %%
print("Before:")
print(tokenizer.decode(model.generate(**tokenizer("a", return_tensors="pt"))[0]))
# %% [markdown]
# ## Train
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rows = load_dataset("acme/birds", split="train")
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=20), train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig())
trainer.train()
