# expect: converted
# has: wait_for_everyone()  # until every rank has read the file
# has: if PartialState().is_local_main_process:
# cause: one rank writes a file that the others may still read
# %%
import json
# %%
import os
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train")
found = [json.loads(line) for line in open("birds.jsonl")]
with open("birds.jsonl", "w") as out:
    out.writelines(json.dumps({"text": one["song"]}) + "\n" for one in found)
rows = load_dataset("json", data_files="birds.jsonl", split="train")
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=20), train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig())
trainer.train()
