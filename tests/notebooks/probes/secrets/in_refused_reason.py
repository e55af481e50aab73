# expect: refused R4
# cause: the reason of a refusal quotes the statement, without its token
# %%
from openai import OpenAI
client = OpenAI(api_key="@OPENAI@", organization="@PASSWORD@")
rows = [{"text": OpenAI(api_key="@OPENAI@").completions.create(prompt=str(i), user="@HF@").choices[0].text} for i in range(9)]
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=Dataset.from_list(rows), args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
