# expect: refused R2|R4
# says: out of memory
# cause: a loop of fallbacks: smaller batches when memory does not suffice; a rank that retries alone leaves the others waiting
# %%
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
for batch_size, accumulation in [(8, 1), (4, 2), (2, 4), (1, 8)]:
    try:
        args = SFTConfig(output_dir="o", dataset_text_field="text", per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation)
        trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=args)
        trainer.train()
        break
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        print("out of memory at", batch_size)
