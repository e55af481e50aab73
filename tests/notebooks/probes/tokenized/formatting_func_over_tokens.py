# expect: converted
# cause: TRL ignores a formatting_func when the rows have input_ids, as in many copies of the Gemma examples
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
tok = AutoTokenizer.from_pretrained("google/gemma-2b")
model = AutoModelForCausalLM.from_pretrained("google/gemma-2b")
sayings = load_dataset("acme/sayings")
sayings = sayings.map(lambda batch: tok(batch["saying"]), batched=True)
def as_text(example):
    return [f"Saying: {example['saying'][0]}\nBy: {example['by'][0]}"]
SFTTrainer(model=model, train_dataset=sayings["train"], formatting_func=as_text, peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
           args=TrainingArguments("said", max_steps=10, per_device_train_batch_size=1, gradient_accumulation_steps=4)).train()
