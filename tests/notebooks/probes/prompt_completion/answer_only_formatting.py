# expect: converted
# cause: a formatting_func makes one text of prompt and completion; TRL trains all of it
# %%
from datasets import Dataset
rows = {"prompt": ["Bonjour", "Merci"], "completion": ["Hello", "Thank you"]}
jeu = Dataset.from_dict(rows)
# %%
# On construit le texte complet
def formater(exemple):
    return f"### Français\n{exemple['prompt']}\n### Anglais\n{exemple['completion']}"
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
modele = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B")
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2-0.5B")
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
entraineur = SFTTrainer(model=modele, train_dataset=jeu, formatting_func=formater, processing_class=tok,
                        args=SFTConfig(output_dir="traduction", max_steps=10), peft_config=LoraConfig(r=4))
entraineur.train()
