# expect: refused R4
# cause: TPU by torch_xla with FSDP of XLA
# %%
!pip install torch_xla[tpu]
# %%
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
device = xm.xla_device()
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
model = AutoModelForCausalLM.from_pretrained("google/gemma-2b").to(device)
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
fsdp_config = {"fsdp_transformer_layer_cls_to_wrap": ["GemmaDecoderLayer"], "xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True}
t = SFTTrainer(model, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", fsdp="full_shard", fsdp_config=fsdp_config, dataloader_drop_last=True))
t.train()
