# expect: converted
# cause: settings in dataclasses, used by attributes and asdict
# %%
from dataclasses import dataclass, field, asdict
@dataclass
class Lora:
    r: int = 24
    lora_alpha: int = 48
    target_modules: list = field(default_factory=lambda: ["q_proj", "o_proj"])
@dataclass
class Run:
    model: str = "mistralai/Mistral-7B-v0.1"
    steps: int = 250
    seq: int = 640
    lora: Lora = field(default_factory=Lora)
run = Run()
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(run.model, train_dataset=ds, peft_config=LoraConfig(**asdict(run.lora), task_type="CAUSAL_LM"),
    args=SFTConfig(output_dir="run", max_length=run.seq, max_steps=run.steps, optim="paged_adamw_32bit", dataset_text_field="text"))
trainer.train()
