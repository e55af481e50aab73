# expect: converted
# has: with wandb.init(project="birds", mode=None if PartialState().is_main_process else "disabled") as run:
# has: run.log({"rows": len(rows)})  # how many
# has: with mlflow.start_run() if PartialState().is_main_process else nullcontext():
# has: from contextlib import nullcontext
# says: `mlflow.start_run()` starts on the main rank
# cause: trackers start in a with around the training, on the main rank
# %%
import mlflow
import wandb
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})


def train(rows):
    with wandb.init(project="birds") as run:
        args = SFTConfig(output_dir="out", max_steps=20)
        trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        run.log({"rows": len(rows)})  # how many


with mlflow.start_run():
    mlflow.log_param("rows", len(rows))
    train(rows)
