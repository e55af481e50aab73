# expect: converted
# hasnot: eval_strategy=
# cause: evaluation_strategy without an eval_dataset, which old versions ignored until the first evaluation
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from peft import LoraConfig
from trl import SFTTrainer
def run(rate):
    model = AutoModelForCausalLM.from_pretrained("microsoft/phi-2")
    tok = AutoTokenizer.from_pretrained("microsoft/phi-2")
    rows = load_dataset("acme/notes", split="train").map(lambda r: {"text": r["note"]})
    if rate > 1:
        return None
    args = TrainingArguments("o", max_steps=5, learning_rate=rate, evaluation_strategy="steps", eval_steps=50)
    t = SFTTrainer(model=model, train_dataset=rows, peft_config=LoraConfig(r=8), dataset_text_field="text", tokenizer=tok, args=args)
    t.train()
    return t
t = run(1e-4)
