# expect: converted
# cause: a dict of input_ids and labels by hand
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=512, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=8)
# %%
pairs = [("2+2", "4"), ("3+5", "8"), ("9-1", "8")]
samples = []
for q, a in pairs:
    p = tokenizer.encode(f"{q} =")
    c = tokenizer.encode(f" {a}", add_special_tokens=False) + [tokenizer.eos_token_id]
    samples.append({"input_ids": p + c, "labels": [-100] * len(p) + c, "attention_mask": [1] * (len(p) + len(c))})
from datasets import Dataset
train_data = Dataset.from_list(samples)
# %%
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=train_data,
                     args=SFTConfig(output_dir="sums", max_steps=30, per_device_train_batch_size=2))
trainer.train()
