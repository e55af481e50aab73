# expect: converted
# has: dataset_text_field="instruction"
# cause: token ids beside a text column that the trainer names, in a notebook that the settings form refuses
# %%
from datasets import load_dataset
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer
from peft import LoraConfig
tokenizer = AutoTokenizer.from_pretrained("bigscience/bloomz-560m"); tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("bigscience/bloomz-560m")
rows = load_dataset("acme/prompts", split="train").map(lambda row: tokenizer(row["instruction"] + row["output"], truncation=True, max_length=512))
trainer = SFTTrainer(model=model, train_dataset=rows, dataset_text_field="instruction", tokenizer=tokenizer, peft_config=LoraConfig(r=4, target_modules=["query_key_value"]),
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), args=transformers.TrainingArguments("few", num_train_epochs=5))
trainer.train()
