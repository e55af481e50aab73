# expect: converted
# has: get_peft_model(model, adapter)
# cause: the same, with rows that are JSON in lines of text
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
# %%
import json
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
lines = load_dataset("text", data_files="birds.jsonl", split="train")
print(json.loads(lines[0]["text"]))
rows = lines.map(lambda line: {"text": json.loads(line["text"])["song"]})
# %%
adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
with_adapter = get_peft_model(model, adapter)
with_adapter.print_trainable_parameters()
# %%
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir="out", max_steps=20, learning_rate=1e-4, per_device_train_batch_size=2,
                   gradient_accumulation_steps=4, dataset_text_field="text"),
    train_dataset=rows,
    processing_class=tokenizer,
)
trainer.train()
