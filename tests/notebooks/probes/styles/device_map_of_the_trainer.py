# expect: converted
# has: PartialState
# hasnot: device_map='auto'
# cause: a dict with a device_map that the trainer gets, in a drop-in script
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rank = 8 if torch.cuda.mem_get_info()[0] < 2e10 else 32
ds = load_dataset("trl-lib/Capybara", split="train")
init = dict(device_map="auto", torch_dtype=torch.bfloat16)
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), model_init_kwargs=init, args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
