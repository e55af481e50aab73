# expect: converted
# has: if PartialState().is_local_main_process:
# has: model = PeftModel.from_pretrained(base, "older", is_trainable=True)
# cause: the same in two statements, as the refusal advises
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
def correct(folder):
    path = Path(folder, "adapter_config.json")
    config = json.loads(path.read_text())
    config.pop("eva_config", None)
    path.write_text(json.dumps(config))


correct("older")
model = PeftModel.from_pretrained(base, "older", is_trainable=True)
# %%
args = SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model("final")
