# expect: converted
# cause: conversational prompt/completion from a map, in the style of TRL's own examples
# fast
# %%
from datasets import load_dataset
SYSTEM = "You answer in one sentence."
def to_pc(example):
    return {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}],
        "completion": [{"role": "assistant", "content": example["answer"]}],
    }
dataset = load_dataset("openai/gsm8k", "main", split="train")
dataset = dataset.map(to_pc, remove_columns=dataset.column_names)
# %%
from trl import SFTTrainer, SFTConfig
from peft import LoraConfig
trainer = SFTTrainer(
    "Qwen/Qwen2.5-0.5B-Instruct",
    train_dataset=dataset,
    args=SFTConfig(output_dir="qwen-gsm8k", max_length=1024, learning_rate=1e-4, lr_scheduler_type="cosine"),
    peft_config=LoraConfig(target_modules="all-linear"),
)
trainer.train()
