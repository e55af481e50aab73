# expect: converted
# cause: functools.partial and a helper hide the call of the tokenizer
# %%
from functools import partial
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
IGNORE = -100
def encode_pair(example, tk, limit):
    source = tk(example["question"], add_special_tokens=False)["input_ids"]
    target = tk(example["answer"], add_special_tokens=False)["input_ids"] + [tk.eos_token_id]
    out = {"input_ids": (source + target)[:limit]}
    out["labels"] = ([IGNORE] * len(source) + target)[:limit]
    out["attention_mask"] = [1] * len(out["input_ids"])
    return out
tk = AutoTokenizer.from_pretrained("mistralai/Mistral-7B-v0.3")
rows = load_dataset("acme/trivia", split="train").map(partial(encode_pair, tk=tk, limit=400))
# %%
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.3", torch_dtype="bfloat16")
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="trivia"), train_dataset=rows, peft_config=LoraConfig(r=8))
trainer.train()
