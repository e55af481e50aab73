# expect: converted
# has: chat_template
# cause: a template with a docstring of messages, set for each row in a function given to map for two splits
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
name = "google/gemma-2b"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
def format_rows(row):
    messages = [{"role": "user", "content": row["talk"]}, {"role": "model", "content": row["note"]}]
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] + '<end_of_turn>\n' }}"
        "{% endfor %}"
    )
    return {"text": tokenizer.apply_chat_template(messages, tokenize=False)}
parts = load_dataset("acme/notes")
train, valid = parts["train"].map(format_rows), parts["validation"].map(format_rows)
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, train_dataset=train, eval_dataset=valid, processing_class=tokenizer, peft_config=LoraConfig(r=8),
           args=SFTConfig(output_dir="notes", dataset_text_field="text", eval_strategy="steps", eval_steps=10)).train()
