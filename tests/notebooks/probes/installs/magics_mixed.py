# expect: converted
# hasnot: nvidia-smi
# hasnot: flash-attn
# cause: %pip, %%bash, !nvidia-smi, apt and conditional installs
# %%
%pip install -q -U "trl>=0.8" peft
!nvidia-smi
%env TOKENIZERS_PARALLELISM=false
# %%
%%bash
pip install flash-attn --no-build-isolation
apt-get install -y git-lfs
# %%
%load_ext autoreload
%autoreload 2
%matplotlib inline
import sys
IN_COLAB = "google.colab" in sys.modules
if IN_COLAB:
    !pip install -q bitsandbytes
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
%time SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
