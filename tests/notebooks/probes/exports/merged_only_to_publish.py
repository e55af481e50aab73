# expect: converted
# has: whole.save_pretrained("whole")
# hasnot: push_to_hub
# says: publish this folder with `hf upload`
# cause: a base model is loaded again and merged only for the hub, where a script publishes nothing: it is saved
# %%
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, setup_chat_format
model = AutoModelForCausalLM.from_pretrained("acme/m")
tok = AutoTokenizer.from_pretrained("acme/m")
model, tok = setup_chat_format(model, tok)
rows = load_dataset("acme/chats", split="train")
trainer = SFTTrainer(model=model, train_dataset=rows, peft_config=LoraConfig(r=4), processing_class=tok,
                     args=SFTConfig(output_dir="o"))
trainer.train()
trainer.model.save_pretrained("adapter")
# %%
again = AutoModelForCausalLM.from_pretrained("acme/m")
whole = PeftModel.from_pretrained(again, "adapter")
whole = whole.merge_and_unload()
whole.push_to_hub("acme/whole")
