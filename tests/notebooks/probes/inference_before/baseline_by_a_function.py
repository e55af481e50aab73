# expect: converted
# hasnot: load_for_tries
# hasnot: answer(
# has: AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B"
# cause: a function loads a model that is tried before the training, and is not trained
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# %%
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})


def load_for_tries(name):
    return AutoModelForCausalLM.from_pretrained(name, device_map={"": 0})


def answer(model, question):
    model.eval()
    ids = tokenizer(question, return_tensors="pt").input_ids.to(model.device)
    return tokenizer.decode(model.generate(ids)[0])


baseline = load_for_tries("Qwen/Qwen2.5-0.5B")
baseline.config.use_cache = False
before = answer(baseline, "What sings?")
print(before)
del baseline
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", device_map="auto")
args = SFTConfig(output_dir="out", max_steps=20)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
