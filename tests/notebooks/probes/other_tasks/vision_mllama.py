# expect: refused R3
# cause: Mllama with its processor, then LoRA by get_peft_model as in a text notebook
# %%
import torch
from transformers import MllamaForConditionalGeneration, AutoProcessor
from peft import LoraConfig, get_peft_model
processor = AutoProcessor.from_pretrained("meta-llama/Llama-3.2-11B-Vision-Instruct")
processor.tokenizer.padding_side = "right"
model = MllamaForConditionalGeneration.from_pretrained("meta-llama/Llama-3.2-11B-Vision-Instruct", dtype=torch.bfloat16, device_map="auto")
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj"]))
model.print_trainable_parameters()
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, train_dataset=load_dataset("acme/charts", split="train"), processing_class=processor, args=SFTConfig(output_dir="o")).train()
