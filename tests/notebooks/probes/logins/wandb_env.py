# expect: converted
# hasnot: wandb.init
# cause: a W&B key put into the environment, wandb.init and wandb.finish
# %%
import os, wandb
from getpass import getpass
os.environ["WANDB_API_KEY"] = getpass("W&B key: ")
os.environ["WANDB_PROJECT"] = "alpaca_ft"
os.environ["WANDB_LOG_MODEL"] = "checkpoint"
run = wandb.init(project="alpaca_ft", job_type="training", config={"lr": 2e-4})
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2b", load_in_4bit=True, max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=16)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", output_dir="x", max_steps=9, report_to="wandb", run_name="r1"))
trainer.train()
wandb.log({"done": 1})
wandb.finish()
model.config.use_cache = True
