# expect: converted
# hasnot: generate(
# cause: a helper generates before and after the training
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen2.5-1.5B-Instruct", load_in_4bit=True, max_seq_length=1024)
def ask(question, n=64):
    FastLanguageModel.for_inference(model)
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt").to("cuda")
    out = model.generate(input_ids=inputs, max_new_tokens=n, use_cache=True)
    return tokenizer.decode(out[0], skip_special_tokens=True)
print("BEFORE:", ask("Who are you?"))
# %%
model = FastLanguageModel.get_peft_model(model, r=16)
FastLanguageModel.for_training(model)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(dataset_text_field="text", output_dir="x", max_steps=9))
trainer.train()
print("AFTER:", ask("Who are you?"))
