# expect: converted
# has: dataset_text_field="full"
# cause: the same beside a prompt, with held-out rows
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments
from trl import SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("facebook/opt-350m")
model = AutoModelForCausalLM.from_pretrained("facebook/opt-350m")
parts = load_dataset("acme/code", split="train").map(lambda row: {"full": row["prompt"] + row["completion"]}).train_test_split(0.1, seed=1)
trainer = SFTTrainer(
    model=model, train_dataset=parts["train"], eval_dataset=parts["test"], peft_config=LoraConfig(r=8), dataset_text_field="full",
    tokenizer=tokenizer, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), args=TrainingArguments(output_dir="o", max_steps=5),
)
trainer.train()
