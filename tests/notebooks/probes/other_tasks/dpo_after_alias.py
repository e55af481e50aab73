# expect: refused R1
# cause: DPOTrainer under an alias, from trl.trainer
# fast
# %%
import trl
from trl.trainer.dpo_trainer import DPOTrainer as PreferenceTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from datasets import load_dataset
m = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
t = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
tr = PreferenceTrainer(model=m, args=trl.DPOConfig(output_dir="dpo"), train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"), processing_class=t)
tr.train()
