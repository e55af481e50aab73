# expect: converted
# cause: try Unsloth, else transformers
# %%
try:
    from unsloth import FastLanguageModel
    HAS_UNSLOTH = True
except ImportError:
    HAS_UNSLOTH = False
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
if HAS_UNSLOTH:
    model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=1024, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=8)
else:
    tokenizer = AutoTokenizer.from_pretrained("unsloth/Llama-3.2-1B")
    model = AutoModelForCausalLM.from_pretrained("unsloth/Llama-3.2-1B")
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=8))
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model=model, train_dataset=ds, processing_class=tokenizer, args=SFTConfig(output_dir="o", dataset_text_field="text", max_length=1024)).train()
