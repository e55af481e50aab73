# expect: refused R3
# cause: datasets.Audio is the only sign of speech
# %%
import datasets
from transformers import AutoModelForCausalLM, AutoProcessor
processor = AutoProcessor.from_pretrained("microsoft/Phi-4-multimodal-instruct", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("microsoft/Phi-4-multimodal-instruct", trust_remote_code=True)
ds = datasets.load_dataset("acme/calls", split="train").cast_column("audio", datasets.Audio())
def col(rows):
    return processor(text=[r["text"] for r in rows], audios=[r["audio"]["array"] for r in rows], return_tensors="pt")
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, train_dataset=ds, data_collator=col, args=SFTConfig(output_dir="o")).train()
