# expect: converted
# has: response_ids
# cause: DataCollatorForCompletionOnlyLM with token ids cut from the encoded template
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer, SFTConfig, DataCollatorForCompletionOnlyLM
tokenizer = AutoTokenizer.from_pretrained("NousResearch/Llama-2-7b-hf")
tokenizer.pad_token = tokenizer.unk_token
model = AutoModelForCausalLM.from_pretrained("NousResearch/Llama-2-7b-hf", load_in_4bit=True)
response_template = "\n### Answer:"
response_ids = tokenizer.encode(response_template, add_special_tokens=False)[2:]
collator = DataCollatorForCompletionOnlyLM(response_ids, tokenizer=tokenizer)
ds = load_dataset("acme/qa", split="train").map(lambda r: {"text": f"### Question: {r['q']}\n### Answer: {r['a']}"})
from peft import LoraConfig
SFTTrainer(model, train_dataset=ds, tokenizer=tokenizer, data_collator=collator, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", packing=False)).train()
