# expect: converted
# hasnot: ConstantLengthDataset
# hasnot: AutoModelForCausalLMWithValueHead
# cause: names that TRL has no more, imported and used only after the training, in the drop-in form
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, AutoModelForCausalLMWithValueHead

def run(rate):
    model = AutoModelForCausalLM.from_pretrained("acme/base")
    tokenizer = AutoTokenizer.from_pretrained("acme/base")
    rows = load_dataset("acme/t", split="train").map(lambda row: {"text": row["a"]})
    if rate > 1:
        return None
    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, peft_config=LoraConfig(r=8), args=SFTConfig("o", learning_rate=rate))
    trainer.train()
    return trainer

trainer = run(1e-4)
trainer.save_model("o")
# %%
from trl.trainer import ConstantLengthDataset
packed = ConstantLengthDataset(tokenizer=trainer.processing_class, dataset=load_dataset("acme/t", split="train"), dataset_text_field="a", seq_length=2048)
for pack in packed:
    print(pack["input_ids"].shape)
    break
