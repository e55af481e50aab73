# expect: converted
# has: get_chat_template
# cause: the usual order: get_chat_template changes the tokenizer for data and export
# %%
from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template, standardize_sharegpt
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Llama-3.2-3B-Instruct", max_seq_length=2048, dtype=None, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "k_proj"], lora_alpha=16, lora_dropout=0, bias="none")
tokenizer = get_chat_template(tokenizer, chat_template="llama-3.1", mapping={"role": "from", "content": "value", "user": "human", "assistant": "gpt"})
def formatting(ex):
    return {"text": [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=False) for c in ex["conversations"]]}
from datasets import load_dataset
ds = standardize_sharegpt(load_dataset("mlabonne/FineTome-100k", split="train")).map(formatting, batched=True)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", max_steps=60, output_dir="o"))
from unsloth.chat_templates import train_on_responses_only
trainer = train_on_responses_only(trainer, instruction_part="<|start_header_id|>user<|end_header_id|>\n\n", response_part="<|start_header_id|>assistant<|end_header_id|>\n\n")
trainer.train()
