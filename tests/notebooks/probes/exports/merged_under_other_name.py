# expect: converted
# kept or named: merge
# cause: the adapter is loaded again under another name and merged; the export must be kept or named as dropped
# %%
import torch
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
OUT = "llama-lora"
tok = AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-1B")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", torch_dtype=torch.bfloat16, device_map="cuda:0")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model=model, processing_class=tok, train_dataset=ds, peft_config=LoraConfig(r=8),
                     args=SFTConfig(output_dir=OUT, dataset_text_field="text"))
trainer.train()
trainer.save_model(OUT)
# %%
del model, trainer
torch.cuda.empty_cache()
fresh = AutoPeftModelForCausalLM.from_pretrained(OUT, torch_dtype=torch.bfloat16, low_cpu_mem_usage=True)
fused = fresh.merge_and_unload()
fused.save_pretrained("llama-merged", safe_serialization=True)
tok.save_pretrained("llama-merged")
