# expect: converted
# kept or named: merge
# cause: AutoPeftModelForCausalLM loads the adapter again and merges it
# %%
import torch
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
args = SFTConfig(output_dir="run", dataset_text_field="text")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=128), args=args)
trainer.train()
trainer.save_model()
# %%
model = AutoPeftModelForCausalLM.from_pretrained(args.output_dir, low_cpu_mem_usage=True, torch_dtype=torch.float16)
model = model.merge_and_unload()
model.save_pretrained(args.output_dir + "/merged", safe_serialization=True, max_shard_size="2GB")
