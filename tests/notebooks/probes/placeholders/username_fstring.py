# expect: converted
# hasnot: push_to_hub(
# cause: an f-string with a placeholder account
# %%
HF_USERNAME = "YOUR_USERNAME"  # TODO: put yours here
model_repo = f"{HF_USERNAME}/qwen-poet"
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
poems = load_dataset("merve/poetry", split="train").map(lambda r: {"text": r["content"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=poems, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="poet", dataset_text_field="text", max_steps=50))
trainer.train()
trainer.model.push_to_hub(model_repo)
