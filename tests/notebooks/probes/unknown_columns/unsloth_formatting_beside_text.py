# expect: converted
# has: formatting_func=
# cause: Unsloth ignores formatting_func if the rows have the text field; a function that returns a batch as a dict is given to both map and trainer
# %%
from datasets import load_dataset
from transformers import TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B-Instruct", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "k_proj"], lora_alpha=16)
# %%
def formatting_prompts_func(examples):
    texts = []
    for question, answer in zip(examples["question"], examples["answer"]):
        texts.append(f"Q: {question}\nA: {answer}" + tokenizer.eos_token)
    return {"text": texts}
ds = load_dataset("org/tickets", split="train")
ds = ds.map(formatting_prompts_func, batched=True)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=ds, dataset_text_field="text", max_seq_length=2048,
    formatting_func=formatting_prompts_func, args=TrainingArguments(output_dir="o"),
)
trainer.train()
