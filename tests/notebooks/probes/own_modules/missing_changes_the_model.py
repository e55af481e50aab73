# expect: refused R4
# says: paste its code
# cause: a module that is not there is given the model before training, under a name that looks harmless
# %%
from utils import apply
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
apply(model)
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["q"] + r["a"]})
SFTTrainer(model, train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
