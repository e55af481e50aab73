# expect: converted
# has: make_archive("before", "zip", "results")
# has: if PartialState().is_local_main_process
# cause: an archive of an earlier result, which one process per machine has to write
# %%
import shutil
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
shutil.make_archive("before", "zip", "results")
# %%
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
train = load_dataset("acme/notes", split="train").map(lambda row: {"text": row["note"]})
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
