# expect: converted
# has: keep = Keep("epochs")
# has: # each epoch
# hasnot: is_local_main_process
# cause: a callback makes a folder, and every rank runs it: the main rank writes
# %%
import os
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train")
class Keep(TrainerCallback):
    def __init__(self, folder):
        self.folder = folder
        os.makedirs(folder, exist_ok=True)

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        # each epoch
        model.save_pretrained(os.path.join(self.folder, f"epoch-{state.epoch}"))
        with open(os.path.join(self.folder, "log.txt"), "a") as log:
            log.write(f"{state.epoch}\n")
keep = Keep("epochs")
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="o", max_steps=20), train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig(), callbacks=[keep])
trainer.train()
