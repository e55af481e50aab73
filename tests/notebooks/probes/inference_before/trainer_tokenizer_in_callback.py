# expect: converted
# has: owner.processing_class
# hasnot: owner.tokenizer
# cause: a callback reads the trainer's tokenizer by its former name, which transformers 5 has no more
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
ds = load_dataset("acme/clues", split="train").map(lambda r: {"text": r["word"] + ": " + r["clue"]})
class Watch(TrainerCallback):
    def __init__(self, owner):
        self.tok = owner.tokenizer
    def on_epoch_end(self, args, state, control, **kwargs):
        print(self.tok.eos_token)
owner = SFTTrainer(model=model, processing_class=tok, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
owner.add_callback(Watch(owner))
owner.train()
merged = owner.model.merge_and_unload()
merged.save_pretrained("merged")
owner.tokenizer.save_pretrained("merged")
