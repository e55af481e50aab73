# expect: converted
# has: quantization_config={"load_in_4bit": True}
# cause: 4 bits by the loader alone, in a notebook that only the drop-in form takes
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B", load_in_4bit=True)
# %%
rank = 8 if torch.cuda.get_device_properties(0).total_memory > 2e10 else 4
trainer = SFTTrainer(
    model=model, args=TrainingArguments("o", max_steps=10), train_dataset=ds, tokenizer=tokenizer,
    peft_config=LoraConfig(r=rank, target_modules="all-linear"),
)
trainer.train()
