# expect: converted
# cause: a trainer whose name has `model` in it
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
ds = load_dataset("trl-lib/Capybara", split="train")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B")
# %%
args = SFTConfig(output_dir="o", max_steps=10)
model_fine_tuner = SFTTrainer(
    model=model, args=args, train_dataset=ds, processing_class=tokenizer, peft_config=LoraConfig(r=8, target_modules="all-linear")
)
model_fine_tuner.train()
