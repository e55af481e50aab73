# expect: converted
# cause: walrus, star expressions, chained assignments and semicolons
# %%
from datasets import load_dataset; from trl import SFTConfig, SFTTrainer; from peft import LoraConfig
base = name = "Qwen/Qwen2.5-0.5B"
if (lr := 1e-4) > 0: print("lr", lr)
first, *rest = ["acme/t", "acme/u"]
ds = load_dataset(first, split="train").map(lambda r: {"text": r["a"]})
(trainer := SFTTrainer(base, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", learning_rate=lr))).train()
