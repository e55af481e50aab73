# expect: converted
# cause: `dataset_text_field="quote"` names a text column; TRL uses it only if there is no prompt or messages column
# %%
!pip install -q "trl==0.12.0" peft
# %%
from datasets import load_dataset
data = load_dataset("Abirate/english_quotes", split="train")
# %%
from transformers import AutoTokenizer, AutoModelForCausalLM
tokenizer = AutoTokenizer.from_pretrained("facebook/opt-350m")
model = AutoModelForCausalLM.from_pretrained("facebook/opt-350m")
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=data, peft_config=LoraConfig(r=8),
    args=SFTConfig(output_dir="/tmp/quotes", dataset_text_field="quote", max_seq_length=1024))
trainer.train()
