# expect: converted
# has: rate=2e-4):  # the rate
# has: # 3. save
# hasnot: try_it(trainer.model
# has: if PartialState().is_main_process:
# has: print = PartialState().print
# cause: a function trains, tries the model and saves: a failing trial must not lose the save, and its text stays
# %%
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

def try_it(model, tokenizer):
    print(tokenizer.decode(model.generate(**tokenizer("a", return_tensors="pt"))[0]))

def run(rate=2e-4):  # the rate
    # 1. load
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", device_map="auto")

    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
    rows = load_dataset("acme/birds", split="train")
    trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", learning_rate=rate), train_dataset=rows, peft_config=LoraConfig())
    trainer.train()
    # 2. try it
    try_it(trainer.model, tokenizer)
    # 3. save
    model.save_pretrained("final")  # keep
    print("saved")

if __name__ == "__main__":
    run(2e-4)
