# expect: refused R4
# says: writes a file and computes model
# says: write the file once before the script starts
# cause: a function corrects the settings of an older adapter and loads it
# %%
import json
from pathlib import Path
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# %%
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})
# %%
def load_older(base, folder):
    path = Path(folder, "adapter_config.json")
    config = json.loads(path.read_text())
    config.pop("eva_config", None)
    path.write_text(json.dumps(config))
    return PeftModel.from_pretrained(base, folder, is_trainable=True)


model = load_older(base, "older")
# %%
args = SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model("final")
