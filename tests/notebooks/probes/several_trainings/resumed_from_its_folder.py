# expect: converted
# says: is left out
# cause: the same trainer continues from a checkpoint in its own folder, after saving and evaluating
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
config = SFTConfig(output_dir="o", dataset_text_field="text", max_steps=10)
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=config)
# %%
result = trainer.train()
print(result.metrics)
# %%
trainer.save_model("o/last")
trainer.evaluate()
print(len(ds), trainer.state.global_step)
# %%
import torch
torch.cuda.empty_cache()
result = trainer.train(resume_from_checkpoint="./o/checkpoint-10")
result.training_loss
