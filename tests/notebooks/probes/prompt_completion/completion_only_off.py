# expect: converted
# cause: completion_only_loss=False trains the prompt, too
# %%
import json
with open("poems.jsonl", "w") as f:
    for i in range(50):
        f.write(json.dumps({"prompt": f"Poem number {i}:", "completion": " roses are red"}) + "\n")
from datasets import load_dataset
poems = load_dataset("json", data_files="poems.jsonl", split="train")
# %%
from trl import SFTTrainer, SFTConfig
cfg = SFTConfig(output_dir="./poems-out", completion_only_loss=False, num_train_epochs=1, seed=11)
trainer = SFTTrainer(model="HuggingFaceTB/SmolLM2-135M", args=cfg, train_dataset=poems)
trainer.train()
