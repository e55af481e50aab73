# expect: converted
# hasnot: gguf
# has: trainer.save_model
# says: it uses gguf, a module of the repository
# cause: what is exported after the training uses a module of another repository
# %%
import sys
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
trainer.save_model("out")
# %%
from peft import PeftModel
base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
merged = PeftModel.from_pretrained(base, "out").merge_and_unload()
if len(rows) > 0:
    merged.save_pretrained("merged")
    sys.path.insert(0, "llama.cpp/gguf-py")
    import gguf
    print(gguf.GGUFReader("merged.gguf"))
