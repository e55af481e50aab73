# expect: refused R2
# says: cell 2: `second.train()`
# says: save it merged
# says: from_pretrained
# cause: the second training starts from the first one's model
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
more = load_dataset("acme/u", split="train").map(lambda r: {"text": r["a"]})
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
model = get_peft_model(model, LoraConfig(r=8))
trainer = SFTTrainer(model=model, train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=5))
# %%
trainer.train()
# %%
second = SFTTrainer(model=model, train_dataset=more, args=SFTConfig(output_dir="p", max_steps=5))
second.train()
