# expect: converted
# hasnot: wandb
# hasnot: login
# has: model.config.use_cache = False
# says: `wandb.login()` is left out
# says: `run = wandb.init(project='birds')` is left out
# cause: functions that the training needs log in and track, which every rank would do
# %%
import wandb
from datasets import load_dataset
from huggingface_hub import login
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
# %%
def load(name):
    login()
    wandb.login()
    model = AutoModelForCausalLM.from_pretrained(name)
    model.config.use_cache = False
    return model, AutoTokenizer.from_pretrained(name)


class Steps(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        wandb.log({"step": state.global_step})


model, tokenizer = load("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})
# %%
def train(rows):
    run = wandb.init(project="birds")
    trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="out", max_steps=20), train_dataset=rows,
                         processing_class=tokenizer, callbacks=[Steps()])
    trainer.train()
    run.log({"rows": len(rows)})
    wandb.finish()
    trainer.save_model("final")


train(rows)
