# expect: converted
# cause: the whole training is in a function that is called once
# fast
# %%
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
def train_model(model_name="Qwen/Qwen2.5-0.5B", lr=1e-4, epochs=1):
    dataset = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
    args = SFTConfig(output_dir="out-fn", learning_rate=lr, num_train_epochs=epochs, dataset_text_field="text")
    trainer = SFTTrainer(model=model_name, args=args, train_dataset=dataset, peft_config=LoraConfig(r=8))
    result = trainer.train()
    trainer.save_model("out-fn/final")
    return trainer, result
# %%
trainer, result = train_model(lr=3e-4)
