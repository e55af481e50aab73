# expect: converted
# cause: TRL 1.15: a model by name, dtype in model_init_kwargs, defaults of SFTConfig
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
trainer = SFTTrainer(model="Qwen/Qwen3-1.7B", train_dataset=load_dataset("acme/sft-mix", split="train"), peft_config=LoraConfig(),
    args=SFTConfig(output_dir="o", model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"}))
trainer.train()
