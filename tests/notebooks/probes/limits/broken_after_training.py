# expect: converted
# says: cell 2 comes after the training
# cause: a cell after the training that this Python cannot parse
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
# %%
trainer.save_model("o/final")
# %%
prompts = ["What is LoRA?"]
with
for prompt in prompts:
    print(prompt)
