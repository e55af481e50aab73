# expect: converted
# cause: evaluation with early stopping and a callback of the notebook
# %%
from datasets import load_dataset
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
class Beep(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kw):
        print("epoch", state.epoch)
both = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]}).train_test_split(0.1, seed=3)
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=both["train"], eval_dataset=both["test"], peft_config=LoraConfig(r=8), callbacks=[EarlyStoppingCallback(early_stopping_patience=2), Beep()],
    args=SFTConfig(output_dir="o", dataset_text_field="text", eval_strategy="steps", eval_steps=20, save_steps=20, load_best_model_at_end=True, metric_for_best_model="eval_loss", per_device_eval_batch_size=2))
trainer.train()
