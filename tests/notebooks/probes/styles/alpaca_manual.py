# expect: converted
# cause: Alpaca with and without input, joined by hand, in a medium tutorial
# %%
from datasets import load_dataset
from transformers import AutoTokenizer
tok = AutoTokenizer.from_pretrained("huggyllama/llama-7b"); tok.pad_token_id = 0
def gen(dp):
    if dp["input"]:
        s = f"Below is an instruction.\n\n### Instruction:\n{dp['instruction']}\n\n### Input:\n{dp['input']}\n\n### Response:\n{dp['output']}"
    else:
        s = f"Below is an instruction.\n\n### Instruction:\n{dp['instruction']}\n\n### Response:\n{dp['output']}"
    return {"text": s}
data = load_dataset("yahma/alpaca-cleaned")["train"].map(gen, remove_columns=["instruction", "input", "output"], num_proc=4)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
from transformers import AutoModelForCausalLM
m = AutoModelForCausalLM.from_pretrained("huggyllama/llama-7b", load_in_8bit=True)
SFTTrainer(m, train_dataset=data, processing_class=tok, peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05), args=SFTConfig(output_dir="alp", dataset_text_field="text", num_train_epochs=3, learning_rate=3e-4)).train()
