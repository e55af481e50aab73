# expect: converted
# has: if "processing_class" in known
# has: given["processing_class"] = tok
# cause: arguments chosen by what the installed trainer takes, which the script's own trainer answers when it runs
# fast
# %%
import inspect
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
config = SFTConfig(output_dir="o", max_steps=7)
# %%
known = inspect.signature(SFTTrainer.__init__).parameters
given = {"model": model, "args": config, "train_dataset": ds, "peft_config": LoraConfig(r=8)}
if "processing_class" in known:
    given["processing_class"] = tok
    print("new release")
elif "tokenizer" in known:
    given["tokenizer"] = tok
if "max_seq_length" in known:
    given["max_seq_length"] = 512
trainer = SFTTrainer(**given)
trainer.train()
