# expect: converted
# says: cell 0 is text
# says: cell 2 is text
# cause: addresses and sentences in code cells, which Jupyter cannot run
# %%
https://colab.research.google.com/drive/14pj2WaDH8gllQh3piJMoDtz6Vt5CXP7Z?usp=sharing
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
# %%
Fine-tuning of a small model on our notes (about 4,000 rows), as described at https://example.org/how?page=3#a=b

The notes are private. If you have none: use others!
LLM--> PROMPT, MEMORY, EMBEDDING
# %%
rows = load_dataset("acme/t", split="train").map(lambda row: {"text": row["a"]})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
