# expect: converted
# cause: a helper that counts parameters and prints them
# %%
from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model, TaskType
model = AutoModelForCausalLM.from_pretrained("bigscience/bloom-560m")
model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, target_modules=["query_key_value"]))
def print_trainable(m):
    t, a = 0, 0
    for _, p in m.named_parameters():
        a += p.numel()
        if p.requires_grad:
            t += p.numel()
    print(f"trainable {t} of {a}: {100 * t / a:.2f}%")
print_trainable(model)
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text"))
history = trainer.train()
history.metrics
