# expect: converted
# cause: get_peft_model after the training is an experiment, not what was trained
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-3B-Instruct", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=64, lora_alpha=128, use_gradient_checkpointing="unsloth")
from datasets import load_dataset
def fmt(b):
    return {"text": [tokenizer.apply_chat_template(m, tokenize=False) for m in b["messages"]]}
dataset = load_dataset("acme/chat", split="train").map(fmt, batched=True)
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset,
                     args=SFTConfig(dataset_text_field="text", max_steps=100, output_dir="outputs", seed=1))
trainer.train()
# %%
# How many parameters would a small adapter have?
tiny, _ = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B-Instruct", load_in_4bit=True)
tiny = FastLanguageModel.get_peft_model(tiny, r=4, lora_alpha=4)
tiny.print_trainable_parameters()
