# expect: refused R1
# cause: SFT first, then DPO in the same notebook
# %%
from trl import SFTConfig, SFTTrainer, DPOConfig, DPOTrainer
from datasets import load_dataset
s = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=load_dataset("trl-lib/Capybara", split="train"), args=SFTConfig(output_dir="sft"))
s.train(); s.save_model("sft")
# %%
d = DPOTrainer("sft", train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"), args=DPOConfig(output_dir="dpo"))
d.train()
