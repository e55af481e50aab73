# expect: converted
# has: nltk.download("stopwords")
# has: nltk.data.find("tokenizers/punkt")
# hasnot: rouge
# cause: data of a package that the rows need is downloaded by the package
# %%
import nltk
from nltk.corpus import stopwords
nltk.download("stopwords")
try:
    nltk.data.find("tokenizers/punkt")
except LookupError:
    nltk.download("punkt")
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")

def short(row):
    words = [word for word in nltk.word_tokenize(row["note"]) if word not in stopwords.words("english")]
    return {"text": " ".join(words)}

rows = load_dataset("acme/notes", split="train").map(short)
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
