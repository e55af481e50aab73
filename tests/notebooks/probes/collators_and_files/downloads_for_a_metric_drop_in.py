# expect: converted
# hasnot: nltk
# cause: a download for a score after the training: nothing kept needs the package
# %%
import nltk
nltk.download("punkt")
nltk.download(["wordnet", "omw-1.4"], quiet=True)
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("acme/base")
model = AutoModelForCausalLM.from_pretrained("acme/base")
def run(rate):
    rows = load_dataset("acme/notes", split="train").map(lambda row: {"text": row["note"]})
    if rate > 1:
        return None
    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, peft_config=LoraConfig(r=8), args=SFTConfig(output_dir="o", dataset_text_field="text"))
    trainer.train()
    return trainer

trainer = run(1e-4)
# %%
from nltk.translate.bleu_score import sentence_bleu
print(sentence_bleu([nltk.word_tokenize("a b")], nltk.word_tokenize("a c")))
