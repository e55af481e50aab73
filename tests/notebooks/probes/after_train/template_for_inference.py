# expect: converted
# hasnot: chatml
# cause: a chat template that is set after the training, for a demo only, trained nothing
# %%
from unsloth import FastLanguageModel
import torch
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/mistral-7b-v0.3", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, random_state=1234)
from datasets import load_dataset
texts = load_dataset("acme/wiki-nl", split="train").map(lambda x: {"text": x["title"] + "\n" + x["body"]})
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=texts,
                     args=SFTConfig(dataset_text_field="text", max_steps=200, output_dir="nl"))
trainer.train()
# %%
from unsloth.chat_templates import get_chat_template
demo_tokenizer = get_chat_template(tokenizer, chat_template="chatml")
ids = demo_tokenizer.apply_chat_template([{"role": "user", "content": "Hoi"}], return_tensors="pt").to("cuda")
print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))
