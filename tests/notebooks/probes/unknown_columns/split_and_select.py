# expect: converted
# cause: train_test_split and select do not say the columns; evaluation rows follow the same rule
# %%
from datasets import load_dataset
raw = load_dataset("acme/notes")
raw = raw["train"].train_test_split(test_size=0.05, seed=13)
train_ds, eval_ds = raw["train"].select(range(1000)), raw["test"]
# %%
from trl import SFTTrainer, SFTConfig
from peft import LoraConfig
training_args = SFTConfig(
    output_dir="notes-lora", eval_strategy="steps", eval_steps=50, save_strategy="no", logging_steps=5,
    per_device_train_batch_size=8, bf16=True, report_to="none",
)
trainer = SFTTrainer(model="google/gemma-2-2b", args=training_args, train_dataset=train_ds, eval_dataset=eval_ds,
                     peft_config=LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, task_type="CAUSAL_LM"))
trainer.train()
