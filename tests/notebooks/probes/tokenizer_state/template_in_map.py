# expect: converted
# has: chat_template = TEMPLATE
# cause: the function given to map sets the chat template as a side effect
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("EleutherAI/pythia-410m")
model = AutoModelForCausalLM.from_pretrained("EleutherAI/pythia-410m")
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
def render(row):
    tokenizer.chat_template = TEMPLATE
    return {"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)}
from datasets import load_dataset
ds = load_dataset("acme/chat-small", split="train").map(render)
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="c", dataset_text_field="text"))
trainer.train()
tokenizer.save_pretrained("c/final")
