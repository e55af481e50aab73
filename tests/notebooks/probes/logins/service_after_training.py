# expect: converted
# hasnot: OpenAI
# cause: a client of a service is made at the top, and judges answers after the training only
# %%
import os
from openai import OpenAI
client = OpenAI(api_key=os.getenv("OPENAI_API_KEY"))
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
# %%
def judge(answer):
    r = client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": f"Rate: {answer}"}])
    return r.choices[0].message.content
print(judge("hello"))
