# expect: converted
# cause: commands that set a variable, log in or show a version, beside rows from a local file
# %%
!CUDA_VISIBLE_DEVICES=0,1
!WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
!python -c "from huggingface_hub.hf_api import HfFolder; HfFolder.save_token('hf_XXXXXXXXXXXXXXXX')"
!python3 -c 'from huggingface_hub import login; login()'
!python -c "import torch, trl; print(torch.__version__, torch.cuda.is_available()); print(trl.__version__)"
!accelerate env
![ ! -d work/results/ ] && mkdir -p work/results/
!test -d logs || mkdir logs
!python -c "from huggingface_hub.hf_api import HfFolder; HfFolder.save_token('@HF@')"
!python -m bitsandbytes
!python -m xformers.info
# %%
import pandas as pd
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rows = Dataset.from_pandas(pd.read_csv("rows.csv")).map(lambda row: {"text": row["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
