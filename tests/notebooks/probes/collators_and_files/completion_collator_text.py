# expect: converted
# cause: DataCollatorForCompletionOnlyLM with both templates as text
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer, SFTConfig, DataCollatorForCompletionOnlyLM
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
collator = DataCollatorForCompletionOnlyLM(instruction_template="<|im_start|>user\n", response_template="<|im_start|>assistant\n", tokenizer=tokenizer)
ds = load_dataset("acme/chat", split="train").map(lambda r: {"text": tokenizer.apply_chat_template(r["messages"], tokenize=False)})
SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, data_collator=collator, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
