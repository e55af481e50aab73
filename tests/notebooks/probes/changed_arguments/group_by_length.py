# expect: converted
# has: group_by_length=True
# cause: a former argument that takes other values today
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
from transformers import TrainingArguments
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("json", data_files="birds.jsonl", split="train")
# %%
trainer = SFTTrainer(
    model=model,
    args=TrainingArguments(output_dir="out", max_steps=20, learning_rate=1e-4, per_device_train_batch_size=2, group_by_length=True),
    train_dataset=rows,
    dataset_text_field="text",
    tokenizer=tokenizer,
    peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
)
trainer.train()
