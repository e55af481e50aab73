# expect: converted
# cause: train(resume_from_checkpoint=True), and train() when there is no checkpoint: one training
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text", num_train_epochs=3))
try:
    trainer.train(resume_from_checkpoint=True)
except ValueError as e:
    if "No valid checkpoint" in str(e):
        print("starting fresh")
        trainer.train()
    else:
        raise
