# expect: refused R3
# cause: speech tokens by SNAC in a helper
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/orpheus-3b-0.1-ft", max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=64)
from datasets import load_dataset, Audio
ds = load_dataset("MrDragonFox/Elise", split="train").cast_column("audio", Audio(sampling_rate=24000))
from snac import SNAC
codec = SNAC.from_pretrained("hubertsiuzdak/snac_24khz")
ds = ds.map(lambda r: {"input_ids": codec.encode(r["audio"]["array"])})
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, train_dataset=ds, args=SFTConfig(output_dir="o")).train()
