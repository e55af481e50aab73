# expect: converted
# fast
# hasnot: your-username
# cause: "your-username/..." under a conditional is still a placeholder
# %%
LITE = True
REPO = "your-username/gemma-lite" if LITE else "your-username/gemma"
from transformers import AutoModelForCausalLM, AutoTokenizer
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
model = AutoModelForCausalLM.from_pretrained("google/gemma-2b")
tokenizer = AutoTokenizer.from_pretrained("google/gemma-2b")
d = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=d, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="g", dataset_text_field="text"))
trainer.train()
model.push_to_hub(REPO)
tokenizer.push_to_hub(REPO)
