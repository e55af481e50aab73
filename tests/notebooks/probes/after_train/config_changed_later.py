# expect: converted
# cause: the config object is changed after the training
# %%
from types import SimpleNamespace
cfg = SimpleNamespace(lr=3e-4, bs=8, model="EleutherAI/pythia-160m")
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
d = load_dataset("roneneldan/TinyStories", split="train[:1%]")
args = SFTConfig(output_dir="pythia", learning_rate=cfg.lr, per_device_train_batch_size=cfg.bs, max_steps=50)
t = SFTTrainer(cfg.model, args=args, train_dataset=d)
t.train()
# %%
cfg.lr = 1.0
args.learning_rate = 5.0
args.per_device_train_batch_size = 1
print("next time", cfg.lr)
