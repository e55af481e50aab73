# expect: converted
# has: data_files="tickets.csv"
# says: /content/tickets.csv became tickets.csv
# cause: a path of Colab, where notebooks start in /content
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, setup_chat_format
model = AutoModelForCausalLM.from_pretrained("acme/m")
tok = AutoTokenizer.from_pretrained("acme/m")
model, tok = setup_chat_format(model, tok)
rows = load_dataset("csv", data_files="/content/tickets.csv", split="train")
trainer = SFTTrainer(model=model, train_dataset=rows, peft_config=LoraConfig(r=4), processing_class=tok,
                     args=SFTConfig(output_dir="o"))
trainer.train()
