# expect: converted
# has: "\nAntwort: "
# cause: docstring in German in a formatting_func
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
def formatiere(beispiel):
    """Erzeugt den Trainingstext.

    Die Frage kommt zuerst,
    danach die Antwort.
    """
    return "Frage: " + beispiel["frage"] + "\nAntwort: " + beispiel["antwort"]
daten = load_dataset("acme/fragen", split="train")
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=daten, formatting_func=formatiere, peft_config=LoraConfig(), args=SFTConfig(output_dir="o"))
trainer.train()
