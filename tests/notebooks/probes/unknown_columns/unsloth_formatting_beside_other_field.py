# expect: converted
# has: dataset_text_field="story"
# cause: Unsloth ignores formatting_func if the rows have the text field
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B-Instruct", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "k_proj"], lora_alpha=16)
# %%
def as_texts(examples):
    return ["Tell: " + one + tokenizer.eos_token for one in examples["title"]]
ds = load_dataset("org/stories")
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=ds["train"], eval_dataset=ds["test"], formatting_func=as_texts,
    args=SFTConfig(output_dir="o", dataset_text_field="story", max_seq_length=2048),
)
trainer.train()
