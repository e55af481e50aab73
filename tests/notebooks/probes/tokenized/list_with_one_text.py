# expect: converted
# has: formatting_func
# cause: formatting_func returns a list with one text, which releases of TRL read differently
# %%
from datasets import load_dataset
from trl import SFTTrainer
from transformers import TrainingArguments
from peft import LoraConfig
rows = load_dataset("acme/t", split="train").select(range(5000))
def prompt(example, answer=True):
    text = f"[INST]{example['output']}[/INST]"
    if answer:
        text += example["instruction"]
    return [text]
SFTTrainer(model="mistralai/Mistral-7B-v0.1", train_dataset=rows, peft_config=LoraConfig(), max_seq_length=512, formatting_func=prompt, args=TrainingArguments(output_dir="o")).train()
