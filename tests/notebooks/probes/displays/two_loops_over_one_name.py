# expect: converted
# hasnot: matplotlib
# hasnot: plt.
# cause: a loop that draws and one that is needed have one variable
# %%
import matplotlib.pyplot as plt
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("json", data_files="birds.jsonl", split="train")
# %%
frame = rows.to_pandas()
kinds = frame["bird"].unique()
fig, axes = plt.subplots(1, 2)
for place, bird in enumerate(kinds):
    axes[place].bar(0, len(frame[frame["bird"] == bird]))
plt.show()
for bird in kinds:
    print(bird, len(frame[frame["bird"] == bird]))
# %%
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4, per_device_train_batch_size=2,
                   gradient_accumulation_steps=4, dataset_text_field="text"),
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
)
trainer.train()
