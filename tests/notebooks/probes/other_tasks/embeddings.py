# expect: refused R1
# cause: sentence embeddings
# %%
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
from datasets import load_dataset
m = SentenceTransformer("all-MiniLM-L6-v2")
SentenceTransformerTrainer(model=m, train_dataset=load_dataset("acme/pairs", split="train"), loss=losses.MultipleNegativesRankingLoss(m)).train()
