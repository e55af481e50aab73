# expect: converted
# cause: the columns get their names by rename_column; an old text field stays in the arguments
# %%
import pandas as pd
from datasets import Dataset
df = pd.read_csv("faq.csv")
df = df.dropna().drop_duplicates()
hf = Dataset.from_pandas(df[["question", "answer"]], preserve_index=False)
hf = hf.rename_column("question", "prompt").rename_column("answer", "completion")
# %%
from transformers import AutoTokenizer, AutoModelForCausalLM, BitsAndBytesConfig
import torch
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                         bnb_4bit_compute_dtype=torch.bfloat16)
base = "mistralai/Mistral-7B-v0.1"
tok = AutoTokenizer.from_pretrained(base)
tok.pad_token = tok.eos_token
model = AutoModelForCausalLM.from_pretrained(base, quantization_config=bnb, device_map="auto")
# %%
from peft import LoraConfig, prepare_model_for_kbit_training, get_peft_model
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM",
                                         target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
# %%
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model, args=SFTConfig("faq-mistral", max_length=512, dataset_text_field="prompt",
                                           per_device_train_batch_size=4), train_dataset=hf, processing_class=tok)
trainer.train()
trainer.save_model()
