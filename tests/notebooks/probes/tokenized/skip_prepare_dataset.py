# expect: converted
# cause: dataset_kwargs={"skip_prepare_dataset": True} over rows that the notebook tokenized
# %%
from datasets import load_dataset
from transformers import AutoTokenizer, AutoModelForCausalLM, DataCollatorForSeq2Seq
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
def process(example):
    ins = tok(f"<|im_start|>user\n{example['q']}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    res = tok(f"{example['a']}", add_special_tokens=False)
    input_ids = ins["input_ids"] + res["input_ids"] + [tok.pad_token_id]
    attention_mask = ins["attention_mask"] + res["attention_mask"] + [1]
    labels = [-100] * len(ins["input_ids"]) + res["input_ids"] + [tok.pad_token_id]
    return {"input_ids": input_ids[:384], "attention_mask": attention_mask[:384], "labels": labels[:384]}
ds = load_dataset("json", data_files="huanhuan.json", split="train")
tokenized_id = ds.map(process, remove_columns=ds.column_names)
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
SFTTrainer(model, train_dataset=tokenized_id, processing_class=tok, data_collator=DataCollatorForSeq2Seq(tokenizer=tok, padding=True), peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_kwargs={"skip_prepare_dataset": True})).train()
