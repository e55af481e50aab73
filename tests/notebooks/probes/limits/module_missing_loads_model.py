# expect: refused R4
# says: own_loading
# cause: the model comes from a module that is not in the notebook: the message names the module
# %%
%cd ../project/src
# %%
from own_loading import get_model_and_tokenizer
model, tokenizer = get_model_and_tokenizer("tiiuae/falcon-7b")
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model, processing_class=tokenizer, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
