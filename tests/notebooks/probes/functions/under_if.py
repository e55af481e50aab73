# expect: converted
# cause: the training is under `if DO_TRAIN:`
# %%
DO_TRAIN = True
DO_EVAL = False
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
if DO_TRAIN:
    trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text", max_steps=40))
    trainer.train()
    trainer.save_model("o/final")
if DO_EVAL:
    print(trainer.evaluate())
