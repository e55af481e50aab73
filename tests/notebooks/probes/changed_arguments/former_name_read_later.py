# expect: converted
# has: settings.max_seq_length
# cause: a former argument is read back
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("json", data_files="birds.jsonl", split="train")
# %%
settings = SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4, per_device_train_batch_size=2,
                     dataset_text_field="text", max_seq_length=256)
print("length", settings.max_seq_length)
# %%
trainer = SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer,
                     peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"))
trainer.train()
