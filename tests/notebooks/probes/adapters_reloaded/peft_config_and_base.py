# expect: converted
# cause: PeftConfig.from_pretrained and a second base model for inference
# %%
from datasets import load_dataset
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("tiiuae/falcon-7b")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("tiiuae/falcon-7b", load_in_4bit=True, device_map="auto")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, peft_config=LoraConfig(r=64, lora_alpha=16, target_modules=["query_key_value"]), args=SFTConfig(output_dir="falcon", dataset_text_field="text"))
trainer.train()
trainer.save_model("falcon/adapter")
# %%
config = PeftConfig.from_pretrained("falcon/adapter")
base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, load_in_8bit=True)
tuned = PeftModel.from_pretrained(base, "falcon/adapter").eval()
print(tokenizer.decode(tuned.generate(**tokenizer("Hi", return_tensors="pt"))[0]))
