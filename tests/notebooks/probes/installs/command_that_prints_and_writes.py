# expect: converted
# says: run it first
# says: python -c
# cause: Python on a shell line that prints what it writes
# %%
!python -c "import pathlib; print(pathlib.Path('rows.csv').write_text('a\nx'))"
# %%
import pandas as pd
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rows = Dataset.from_pandas(pd.read_csv("rows.csv")).map(lambda row: {"text": row["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
