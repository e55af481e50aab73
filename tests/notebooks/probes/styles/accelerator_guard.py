# expect: converted
# hasnot: Accelerator(
# cause: Accelerator and PartialState only place the model
# %%
from accelerate import Accelerator, PartialState
import torch
device_index = Accelerator().process_index
device_map = {"": device_index}
device_string = PartialState().process_index
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", device_map={"": device_string}, torch_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained("mistralai/Mistral-7B-v0.1"); tokenizer.pad_token = tokenizer.eos_token
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model, processing_class=tokenizer, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})).train()
