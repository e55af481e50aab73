# expect: converted
# has: "add_special_tokens": False
# cause: SFTTrainer says that the argument has no effect
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("json", data_files="birds.jsonl", split="train")
# %%
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4, per_device_train_batch_size=2,
                   gradient_accumulation_steps=4, dataset_text_field="text"),
    train_dataset=rows,
    processing_class=tokenizer,
    dataset_kwargs={"add_special_tokens": False, "append_concat_token": False},
    peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
)
trainer.train()
