# expect: converted
# cause: a second SFTTrainer only evaluates; its arguments are not those of the training
# fast
# %%
from datasets import load_dataset
from trl import SFTTrainer, SFTConfig
from peft import LoraConfig
ds = load_dataset("acme/text", split="train")
ds = ds.map(lambda r: {"text": r["body"].strip()})
test = load_dataset("acme/text", split="test").map(lambda r: {"text": r["body"].strip()})
# %%
trainer = SFTTrainer("Qwen/Qwen2.5-1.5B", args=SFTConfig(output_dir="a", learning_rate=2e-4, num_train_epochs=2),
                     train_dataset=ds, peft_config=LoraConfig(r=16, lora_alpha=32))
trainer.train()
# %%
checker = SFTTrainer(trainer.model, args=SFTConfig(output_dir="b", max_steps=77, learning_rate=9e-9),
                     train_dataset=ds, eval_dataset=test)
print(checker.evaluate())
