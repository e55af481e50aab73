# expect: converted
# has: apply_chat_template
# cause: Unsloth's apply_chat_template changes the tokenizer; the saved template must not depend on the data cache
# fast
# %%
from unsloth import FastLanguageModel, apply_chat_template, to_sharegpt, standardize_sharegpt
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b-bnb-4bit", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
from datasets import load_dataset
dataset = load_dataset("vicgalle/alpaca-gpt4", split="train")
dataset = to_sharegpt(dataset, merged_prompt="{instruction}[[\nYour input is:\n{input}]]", output_column_name="output", conversation_extension=3)
dataset = standardize_sharegpt(dataset)
chat_template = """Below are some instructions. Write responses.

### Instruction:
{INPUT}

### Response:
{OUTPUT}"""
dataset = apply_chat_template(dataset, tokenizer=tokenizer, chat_template=chat_template)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset, args=SFTConfig(
    dataset_text_field="text", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=60, output_dir="o"))
trainer.train()
model.save_pretrained_gguf("model", tokenizer, quantization_method="q8_0")
