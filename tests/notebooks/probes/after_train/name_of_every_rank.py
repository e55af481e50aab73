# expect: converted
# hasnot: if PartialState().is_main_process: save_dir
# has: wait_for_everyone()
# has: trainer.save_model(save_dir)
# cause: the folder that every rank saves to is named after the training
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
    peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
)
trainer.train()
# %%
save_dir = "final"
trainer.save_model(save_dir)
tokenizer.save_pretrained(save_dir)
