# expect: converted
# cause: add_tokens with full fine-tuning: the new rows of the embedding are trained
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M")
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
added = tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
print("added", added)
if added > 0:
    model.resize_token_embeddings(len(tokenizer))
tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
from datasets import load_dataset
ds = load_dataset("HuggingFaceTB/smoltalk", "everyday-conversations", split="train")
ds = ds.map(lambda r: {"text": tokenizer.apply_chat_template(r["messages"], tokenize=False)})
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, train_dataset=ds, processing_class=tokenizer, args=SFTConfig(output_dir="smol", dataset_text_field="text", max_steps=1000))
trainer.train()
