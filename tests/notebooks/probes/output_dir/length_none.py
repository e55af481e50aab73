# expect: converted
# hasnot: max_length=
# cause: max_seq_length=None was the default length of TRL 0.9, not "no limit"
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
length = None
def go(rate):
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
    tok = AutoTokenizer.from_pretrained("meta-llama/Llama-2-7b-hf")
    rows = load_dataset("acme/laws", split="train").map(lambda r: {"text": r["law"]})
    if rate > 1:
        return None
    t = SFTTrainer(model=model, train_dataset=rows, peft_config=LoraConfig(r=64), dataset_text_field="text", max_seq_length=length,
                   tokenizer=tok, args=TrainingArguments("out", max_steps=5, learning_rate=rate), packing=False)
    t.train()
    return t
t = go(2e-4)
