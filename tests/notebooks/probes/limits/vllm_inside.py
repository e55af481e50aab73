# expect: refused R6
# says: fast_inference=False
# cause: fast_inference=True starts vLLM in the training process
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-4B", max_seq_length=1024, load_in_4bit=True, fast_inference=True, gpu_memory_utilization=0.7)
model = FastLanguageModel.get_peft_model(model, r=16)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, processing_class=tokenizer, train_dataset=load_dataset("acme/t", split="train"), args=SFTConfig(output_dir="o")).train()
