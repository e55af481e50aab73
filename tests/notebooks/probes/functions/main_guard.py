# expect: converted
# cause: def main() with everything, under a __main__ guard
# %%
import argparse
from dataclasses import dataclass
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer
@dataclass
class Args:
    model: str = "Qwen/Qwen2.5-0.5B"
    lr: float = 5e-5
    out: str = "runs/one"
def build_data(tok):
    ds = load_dataset("acme/t", split="train")
    return ds.map(lambda r: {"text": r["a"] + tok.eos_token})
def main(a: Args):
    set_seed(7)
    tok = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=8))
    trainer = SFTTrainer(model=model, processing_class=tok, train_dataset=build_data(tok),
                         args=SFTConfig(output_dir=a.out, learning_rate=a.lr, dataset_text_field="text"))
    trainer.train()
    trainer.save_model(a.out)
if __name__ == "__main__":
    main(Args())
