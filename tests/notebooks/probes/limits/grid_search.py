# expect: refused R2|R4
# cause: a loop over learning rates: a training for each
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train")
results = {}
for lr in [1e-5, 5e-5, 2e-4]:
    for rank in (8, 16):
        trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=rank), args=SFTConfig(output_dir=f"grid/{lr}-{rank}", learning_rate=lr))
        results[lr, rank] = trainer.train().training_loss
print(min(results, key=results.get))
