# expect: converted
# hasnot: llama_patch
# cause: a patch of an own module under a constant that is False
# %%
use_flash_attention = False
if use_flash_attention:
    from utils.llama_patch import replace_attention
    replace_attention()
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from trl import SFTTrainer
tok = AutoTokenizer.from_pretrained("NousResearch/Llama-2-7b-hf")
model = AutoModelForCausalLM.from_pretrained("NousResearch/Llama-2-7b-hf", load_in_4bit=True)
if use_flash_attention:
    from utils.llama_patch import forward
    assert model.model.layers[0].self_attn.forward.__doc__ == forward.__doc__
model = prepare_model_for_kbit_training(model)
args = TrainingArguments("dolly", per_device_train_batch_size=6 if use_flash_attention else 4, bf16=True)
if use_flash_attention:
    from utils.llama_patch import upcast
    model = upcast(model, args.bf16)
model = get_peft_model(model, LoraConfig(r=64, lora_alpha=16))
ds = load_dataset("databricks/databricks-dolly-15k", split="train")
def fmt(s):
    return f"### Task\n{s['instruction']}\n### Answer\n{s['response']}"
SFTTrainer(model=model, train_dataset=ds, tokenizer=tok, formatting_func=fmt, max_seq_length=2048, packing=True, args=args).train()
