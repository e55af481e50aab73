# expect: converted
# cause: apply_chat_template with tokenize=True gives token ids
# %%
from transformers import AutoTokenizer, AutoModelForCausalLM
tok = AutoTokenizer.from_pretrained("google/gemma-2-2b-it")
model = AutoModelForCausalLM.from_pretrained("google/gemma-2-2b-it", attn_implementation="eager")
from datasets import load_dataset
d = load_dataset("acme/dialogs", split="train")
def encode(e):
    ids = tok.apply_chat_template(e["messages"], tokenize=True, return_dict=False)
    return dict(input_ids=ids, attention_mask=[1] * len(ids), labels=ids.copy())
d = d.map(encode, remove_columns=["messages"])
from trl import SFTTrainer, SFTConfig
from peft import LoraConfig
t = SFTTrainer(model=model, train_dataset=d, args=SFTConfig(output_dir="g"), peft_config=LoraConfig(r=4))
t.train()
