# expect: converted
# cause: target modules found in the model and collected in a set, whose order differs between processes
# %%
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, DataCollatorForLanguageModeling
from peft import LoraConfig, get_peft_model
from trl import SFTTrainer
model = AutoModelForCausalLM.from_pretrained("google/gemma-2b")
tok = AutoTokenizer.from_pretrained("google/gemma-2b")
def linear_names(model):
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found.add(name.split(".")[-1])
    found.discard("lm_head")
    return list(found)
model = get_peft_model(model, LoraConfig(r=32, lora_alpha=32, target_modules=linear_names(model)))
rows = load_dataset("acme/faq", split="train").map(lambda r: {"text": r["q"] + r["a"]})
trainer = SFTTrainer(model=model, train_dataset=rows, dataset_text_field="text", tokenizer=tok, args=TrainingArguments("o", max_steps=9),
                     data_collator=DataCollatorForLanguageModeling(tok, mlm=False))
trainer.train()
