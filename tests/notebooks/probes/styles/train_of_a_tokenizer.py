# expect: converted
# cause: a tokenizer is trained before, only to compare its tokens with the model's
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
from tokenizers import ByteLevelBPETokenizer
own = ByteLevelBPETokenizer()
own.train(files=["corpus.txt"], vocab_size=5000)
print(own.encode("Hello").tokens)
# %%
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
