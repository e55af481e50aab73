# expect: converted
# has: if PartialState().is_main_process:
# has: wandb.log({"step": state.global_step})  # of the run
# has: self.run.log({"rate": 2e-4})
# hasnot: wandb.login
# says: `wandb.login()` is left out
# cause: the trainer reports to W&B, and a callback logs to it: on the main rank
# %%
import wandb
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
# %%
class Steps(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        wandb.login()
        self.run = wandb.init(project="birds")

    def on_log(self, args, state, control, **kwargs):
        wandb.log({"step": state.global_step})  # of the run
        self.run.log({"rate": 2e-4})


model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})
args = SFTConfig(output_dir="out", max_steps=20, report_to="wandb")
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=[Steps()])
trainer.train()
