# expect: converted
# has: short["max_steps"] = 33
# cause: a dict with two names is changed by the second one, beside a pipeline that the training does not need
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, pipeline
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("facebook/opt-350m")
model = AutoModelForCausalLM.from_pretrained("facebook/opt-350m")
pipe = pipeline("text-generation", model=model, tokenizer=tok)
print(pipe("Hello"))
settings = {"train": {"max_steps": 7}}
short = settings["train"]
short["max_steps"] = 33
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, processing_class=tok, peft_config=LoraConfig(r=8), data_collator=DataCollatorForLanguageModeling(tok, mlm=False), args=SFTConfig(output_dir="o", max_steps=settings["train"]["max_steps"]))
trainer.train()
