# expect: refused R3
# cause: a ForConditionalGeneration class under a switch of quantizations
# %%
from transformers import Mistral3ForConditionalGeneration, FineGrainedFP8Config, BitsAndBytesConfig
FP8 = False
if FP8:
    quantization = FineGrainedFP8Config(dequantize=False)
else:
    quantization = BitsAndBytesConfig(load_in_4bit=True)
model = Mistral3ForConditionalGeneration.from_pretrained("mistralai/Ministral-3-3B-Instruct-2512", quantization_config=quantization)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer(model=model, train_dataset=load_dataset("trl-lib/llava-instruct-mix", split="train"), peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o")).train()
