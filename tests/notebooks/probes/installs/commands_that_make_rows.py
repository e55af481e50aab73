# expect: converted
# says: run it first
# cause: Python on a shell line that writes the rows, after a variable and a version
# %%
!SEED=1 python -c "import pandas as pd; pd.DataFrame({'a': ['x']}).to_csv('rows.csv')"
# %%
import pandas as pd
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rows = Dataset.from_pandas(pd.read_csv("rows.csv")).map(lambda row: {"text": row["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
