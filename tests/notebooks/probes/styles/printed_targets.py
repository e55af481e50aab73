# expect: converted
# cause: target modules that are only printed, which is harmless, beside best model by epoch
# has: print(config
# %%
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
ds = load_dataset("trl-lib/Capybara")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B")
# %%
config = LoraConfig(r=8, target_modules=["v_proj", "q_proj"])
print(config.target_modules, config.r)
model = get_peft_model(model, config)
args = TrainingArguments("o", max_steps=10, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
trainer = SFTTrainer(model=model, args=args, train_dataset=ds["train"], eval_dataset=ds["test"], tokenizer=tokenizer)
trainer.train()
