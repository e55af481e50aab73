# expect: converted
# has: formatting_func=to_text
# cause: the formatting function is chosen under a constant; each choice takes a batch
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer
PLAIN = True
tok = AutoTokenizer.from_pretrained("acme/m")
model = AutoModelForCausalLM.from_pretrained("acme/m")
rows = load_dataset("acme/tickets", split="train")
def plain(batch):
    out = []
    for i in range(len(batch["ticket"])):
        out.append(f"# Ticket\n{batch['ticket'][i]}\n# Reply\n{batch['reply'][i]}")
    return out
def chat(batch):
    out = []
    for i in range(len(batch["ticket"])):
        out.append(tok.apply_chat_template([{"role": "user", "content": batch["ticket"][i]}], tokenize=False))
    return out
if PLAIN:
    to_text = plain
    collator = DataCollatorForCompletionOnlyLM(tok.encode("\n# Reply\n", add_special_tokens=False)[1:], tokenizer=tok)
else:
    to_text = chat
trainer = SFTTrainer(model=model, train_dataset=rows, peft_config=LoraConfig(r=4), formatting_func=to_text,
                     data_collator=collator, processing_class=tok, args=SFTConfig(output_dir="o"))
trainer.train()
