# expect: converted
# cause: rows of a parquet file by pandas
# %%
import pandas as pd, torch
from datasets import Dataset
frame = pd.read_parquet("hf://datasets/acme/chats/train.parquet").sample(frac=0.1, random_state=0)
print(frame.head())
data = Dataset.from_pandas(frame.reset_index(drop=True))
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer, SFTConfig
MODEL = "meta-llama/Llama-3.2-1B-Instruct"
model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
args = SFTConfig(output_dir="llama-chats", packing=True, max_length=2048, learning_rate=1e-5)
SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer).train()
