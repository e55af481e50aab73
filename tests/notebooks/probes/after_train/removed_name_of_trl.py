# expect: converted
# has: resize_token_embeddings
# hasnot: ConstantLengthDataset
# cause: after the training, a look at the rows with a class that TRL has no more
# %%
from dataclasses import dataclass
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("microsoft/phi-2")
model = AutoModelForCausalLM.from_pretrained("microsoft/phi-2")

@dataclass
class Marks:
    start: str = "<|im_start|>"
    end: str = "<|im_end|>"

tokenizer.add_special_tokens({"additional_special_tokens": [Marks.start, Marks.end]})
model.resize_token_embeddings(len(tokenizer))
# %%
rows = load_dataset("acme/t", split="train").map(lambda row: {"text": Marks.start + row["a"] + Marks.end})
trainer = SFTTrainer(model=model, train_dataset=rows, processing_class=tokenizer, peft_config=LoraConfig(r=8, modules_to_save=["embed_tokens", "lm_head"]), args=SFTConfig(output_dir="o", dataset_text_field="text", packing=True))
trainer.train()
trainer.save_model("o")
# %%
from trl.trainer import ConstantLengthDataset
from trl import DPOConfig
packed = ConstantLengthDataset(tokenizer=tokenizer, dataset=rows, dataset_text_field="text", seq_length=2048, shuffle=False)
# %%
from tqdm import tqdm
for pack in tqdm(packed):
    print(pack["input_ids"].shape, tokenizer.decode(pack["input_ids"].tolist()))
    break
