# expect: converted
# fast
# cause: TRL 0.7: arguments of the trainer, `tokenizer=`, TrainingArguments' defaults
# %%
!pip install trl==0.7.4 transformers==4.35.2
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("facebook/opt-350m")
model = AutoModelForCausalLM.from_pretrained("facebook/opt-350m")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, TrainingArguments("out07"), train_dataset=ds, tokenizer=tokenizer, dataset_text_field="text", max_seq_length=1024, peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"))
trainer.train()
