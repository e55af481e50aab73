# expect: converted
# has: save_pretrained_merged
# cause: the export's folder is computed from Path objects that the data also uses
# %%
from pathlib import Path
ROOT = Path("/content/project")
if not ROOT.exists():
    ROOT = Path.cwd()
DATA, MERGED = ROOT / "data", ROOT / "artifacts" / "merged"
for d in (DATA, MERGED):
    d.mkdir(parents=True, exist_ok=True)
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2b", load_in_4bit=True, max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=16)
import json
from datasets import Dataset
rows = [json.loads(l) for l in (DATA / "train.jsonl").read_text().splitlines()]
ds = Dataset.from_list([{"text": r["a"]} for r in rows])
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", output_dir=str(ROOT / "outputs"), max_steps=9))
trainer.train()
model.save_pretrained_merged(str(MERGED / "final"), tokenizer, save_method="merged_16bit")
