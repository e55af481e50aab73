# expect: refused R1
# cause: ORPO with Unsloth's patch
# %%
from unsloth import FastLanguageModel, PatchDPOTrainer
PatchDPOTrainer()
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b-bnb-4bit", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
from trl import ORPOConfig, ORPOTrainer
from datasets import load_dataset
o = ORPOTrainer(model=model, train_dataset=load_dataset("reciperesearch/dolphin-sft-v0.1-preference", split="train"), tokenizer=tokenizer, args=ORPOConfig(output_dir="o"))
o.train()
