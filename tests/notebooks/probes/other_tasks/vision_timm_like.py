# expect: refused R3
# cause: Unsloth's vision loader under an alias
# %%
from unsloth import FastVisionModel as FVM
from unsloth.trainer import UnslothVisionDataCollator as Coll
model, tok = FVM.from_pretrained("unsloth/Pixtral-12B-2409", load_in_4bit=True)
model = FVM.get_peft_model(model, finetune_vision_layers=True, r=16)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, tokenizer=tok, data_collator=Coll(model, tok), train_dataset=load_dataset("unsloth/LaTeX_OCR", split="train"), args=SFTConfig(output_dir="o", max_steps=3)).train()
