# expect: converted
# has: setup_chat_format(model=model, tokenizer=tokenizer)
# cause: the chat format is set up before the adapter is attached, and the rows are formatted with it
# %%
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, setup_chat_format
model = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B", attn_implementation="eager")
tokenizer = AutoTokenizer.from_pretrained("meta-llama/Meta-Llama-3-8B")
tokenizer.chat_template = None
model, tokenizer = setup_chat_format(model=model, tokenizer=tokenizer)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
# %%
def as_text(row):
    chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    return {"text": tokenizer.apply_chat_template(chat, tokenize=False)}
ds = load_dataset("csv", data_files="train.csv", split="train").map(as_text)
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", max_steps=5, dataset_text_field="text"))
trainer.train()
