# expect: converted
# has: def collate
# cause: a collator of the notebook decides the labels
# %%
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer, SFTConfig
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
def collate(batch):
    ids = [torch.tensor(b["input_ids"]) for b in batch]
    x = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    y = x.clone()
    y[x == tokenizer.pad_token_id] = -100
    y[:, :5] = -100
    return {"input_ids": x, "attention_mask": (x != tokenizer.pad_token_id).long(), "labels": y}
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, data_collator=collate, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
