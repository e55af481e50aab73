# expect: converted
# cause: the whole set is encoded by a lambda, and the trainer still names a text column
# %%
from datasets import load_dataset
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer
from peft import LoraConfig
name = "bigscience/bloomz-560m"
tokenizer = AutoTokenizer.from_pretrained(name); tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(name)
data = load_dataset("acme/prompts")
data = data.map(lambda s: tokenizer(s["prompt"]), batched=True)
few = data["train"].select(range(50)).remove_columns("act")
SFTTrainer(model=model, train_dataset=few, dataset_text_field="prompt", tokenizer=tokenizer, peft_config=LoraConfig(r=4, target_modules=["query_key_value"]),
           args=transformers.TrainingArguments("few", num_train_epochs=5)).train()
