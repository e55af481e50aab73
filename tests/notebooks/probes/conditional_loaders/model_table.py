# expect: converted
# cause: the model is chosen from a table by a key, as in Colab forms
# %%
#@title Choose a model { run: "auto" }
model_choice = "phi" #@param ["phi", "gemma", "tiny"]
epochs = 2 #@param {type:"integer"}
MODELS = {"phi": "microsoft/phi-2", "gemma": "google/gemma-2b", "tiny": "TinyLlama/TinyLlama_v1.1"}
MODEL_ID = MODELS[model_choice]
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(MODEL_ID, train_dataset=ds, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text", num_train_epochs=epochs)).train()
