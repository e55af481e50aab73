# expect: converted
# has: <pad>
# cause: a new pad token with a resize by one
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
tok = AutoTokenizer.from_pretrained("meta-llama/Llama-2-7b-hf")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", load_in_8bit=True, device_map="auto")
tok.add_special_tokens({'pad_token': '<pad>'})
model.resize_token_embeddings(len(tok), pad_to_multiple_of=8)
model.config.pad_token_id = tok.pad_token_id
# %%
from peft import LoraConfig, prepare_model_for_kbit_training, get_peft_model
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
from trl import SFTTrainer, SFTConfig
SFTTrainer(model=model, train_dataset=ds, processing_class=tok, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
