# expect: converted
# cause: nothing in the notebook says which columns the hub data set has
# fast
# %%
from datasets import load_dataset
from trl import SFTTrainer, SFTConfig
from peft import LoraConfig
train = load_dataset("acme/mystery-set", split="train[:2000]")
trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", args=SFTConfig(output_dir="out", max_length=768), train_dataset=train,
                     peft_config=LoraConfig(r=16))
trainer.train()
