# expect: refused R2|R4
# cause: a training function that is called for each of two models
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
def run(name):
    ds = load_dataset("acme/t", split="train")
    t = SFTTrainer(name, train_dataset=ds, args=SFTConfig(output_dir=name.replace("/", "_")))
    t.train()
    return t.state.log_history[-1]
a = run("Qwen/Qwen2.5-0.5B")
b = run("HuggingFaceTB/SmolLM2-360M")
print(a, b)
