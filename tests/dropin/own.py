"""A user's script on our trainer, for tests/distributed/test_drop_in.py."""

import argparse
import json
import os
import signal
import sys

from finetune import SFTConfig, SFTTrainer  # isort: skip
from datasets import load_dataset
from transformers import TrainerCallback

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--stop_at", type=int, default=0, help="optimizer step after which rank 0 gets SIGTERM")
parser.add_argument("--split_without_seed", action="store_true")
parser.add_argument("--shared_by", type=int, default=1, help="ranks that share each row")
parser.add_argument("--max_steps", type=int, default=6)
parser.add_argument("--save_steps", type=int, default=2)
parser.add_argument("--metrics", action="store_true", help="ask for what is refused")
options = parser.parse_args()


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == options.stop_at and args.process_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)


rows = load_dataset("json", data_files=options.data, split="train")
if options.split_without_seed:
    rows = rows.train_test_split(0.2)["train"]
trainer = SFTTrainer(
    options.model,
    SFTConfig(
        output_dir=options.out,
        max_steps=options.max_steps,
        save_steps=options.save_steps,
        logging_steps=1,
        learning_rate=1e-3,
        per_device_train_batch_size=1,
        report_to="none",
        bf16=False,
        context_parallel=options.shared_by,
    ),
    train_dataset=rows,
    eval_dataset=rows.select(range(5)),
    callbacks=[Stop()],
    compute_metrics=print if options.metrics else None,
    global_batch_size=4,
)
trainer.train(resume_from_checkpoint=options.resume or None)
held_out = trainer.evaluate()["eval_loss"]
trainer.save_model()
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    sys.stdout.write(json.dumps({"losses": losses, "eval_loss": held_out}) + "\n")
