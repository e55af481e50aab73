# expect: converted
# cause: after the training, train() of another object
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
import faiss
import sentencepiece as spm
ds = load_dataset("trl-lib/Capybara", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", max_steps=5))
trainer.train()
trainer.save_model("o")
# %%
groups = faiss.Kmeans(768, 20, niter=20)
groups.train(vectors)
spm.SentencePieceTrainer.train("--input=corpus.txt --model_prefix=m --vocab_size=1000")
