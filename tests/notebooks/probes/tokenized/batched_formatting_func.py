# expect: converted
# has: text
# cause: a batched formatting function that returns a list is applied to batches; one text per row
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer
dataset = load_dataset("lucasmccabe-lmi/CodeAlpaca-20k", split="train")
model = AutoModelForCausalLM.from_pretrained("facebook/opt-350m")
tokenizer = AutoTokenizer.from_pretrained("facebook/opt-350m")
def formatting_prompts_func(example):
    output_texts = []
    for i in range(len(example["instruction"])):
        text = f"### Question: {example['instruction'][i]}\n ### Answer: {example['output'][i]}"
        output_texts.append(text)
    return output_texts
trainer = SFTTrainer(model, train_dataset=dataset, formatting_func=formatting_prompts_func, tokenizer=tokenizer,
                     args=TrainingArguments(output_dir="codealpaca", max_steps=40))
trainer.train()
