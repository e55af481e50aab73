# expect: converted
# has: and "http" not in
# cause: a docstring of several lines in a function given to filter, with indented text
# %%
from datasets import load_dataset
def is_good(example) -> bool:
    '''Keep short rows only.

        * less than 500 characters
        * no links
    '''
    return len(example["text"]) < 500 and "http" not in example["text"]
data = load_dataset("acme/posts", split="train").filter(is_good)
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2b", load_in_4bit=True, max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=16)
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=data, args=SFTConfig(dataset_text_field="text", output_dir="x", max_steps=9))
trainer.train()
