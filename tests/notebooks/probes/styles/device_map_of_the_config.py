# expect: converted
# hasnot: device_map: auto
# cause: device_map among the arguments with which the trainer loads the model
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8),
    args=SFTConfig(output_dir="o", max_steps=5, model_init_kwargs={"device_map": "auto", "dtype": "bfloat16"}))
trainer.train()
