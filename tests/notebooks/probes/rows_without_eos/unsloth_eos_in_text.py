# expect: converted
# has: eos_token
# cause: texts that end with EOS: both libraries agree
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/mistral-7b-bnb-4bit", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
EOS = tokenizer.eos_token
from datasets import load_dataset
data = load_dataset("acme/qa", split="train").map(lambda r: {"text": r["question"] + "\n" + r["answer"] + EOS})
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, train_dataset=data, args=SFTConfig(output_dir="outputs", dataset_text_field="text", max_steps=20)).train()
