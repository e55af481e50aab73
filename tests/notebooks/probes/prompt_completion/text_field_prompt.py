# expect: converted
# cause: TRL reads prompt and completion first; the text field is unused
# %% [markdown]
# # Fine-tune TinyLlama on support tickets
# %%
!pip install -q transformers trl peft datasets
# %%
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# %%
model_id = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype=torch.bfloat16)
# %%
tickets = [
    {"prompt": "My printer is on fire", "completion": "Please unplug it and step back."},
    {"prompt": "I forgot my password", "completion": "Use the reset link."},
]
ds = Dataset.from_list(tickets)
# %%
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir="tickets", dataset_text_field="prompt", num_train_epochs=3, learning_rate=2e-4),
    train_dataset=ds,
    peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"),
    processing_class=tokenizer,
)
trainer.train()
