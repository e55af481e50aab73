# expect: converted
# hasnot: show_answer
# hasnot: src.
# cause: a module that is not there is used only to display the result
# %%
import sys
sys.path.append("..")
from src.display import show_answer, plot_history
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"] + r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=11))
trainer.train()
# %%
plot_history(trainer.state.log_history)
show_answer(trainer.model, "What is a mole?")
