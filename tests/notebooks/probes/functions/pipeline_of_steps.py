# expect: converted
# has: pad_token
# cause: a cell of function calls with prints between, each with dataclasses, ends with the training
# %%
from dataclasses import dataclass
@dataclass
class ModelCfg:
    name: str
    max_len: int = 1024
@dataclass
class TrainCfg:
    out: str
    lr: float = 1e-4
    epochs: int = 1
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
def make_tokenizer(c: ModelCfg):
    t = AutoTokenizer.from_pretrained(c.name)
    if t.pad_token is None:
        t.pad_token = t.eos_token
    return t
def make_model(c: ModelCfg):
    m = AutoModelForCausalLM.from_pretrained(c.name)
    return get_peft_model(m, LoraConfig(r=16, lora_alpha=32))
def make_data(t):
    return load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"] + t.eos_token})
def fit(data, model, cfg: TrainCfg, c: ModelCfg):
    trainer = SFTTrainer(model=model, train_dataset=data, args=SFTConfig(output_dir=cfg.out, learning_rate=cfg.lr, num_train_epochs=cfg.epochs, max_length=c.max_len, dataset_text_field="text"))
    trainer.train()
    trainer.save_model()
    return trainer
# %%
mc, tc = ModelCfg("Qwen/Qwen2.5-0.5B"), TrainCfg("steps")
print("1. tokenizer"); tok = make_tokenizer(mc)
print("2. data"); data = make_data(tok)
print("3. model"); model = make_model(mc)
print("4. training"); trainer = fit(data, model, tc, mc)
print("done", mc.name.split("/")[-1])
