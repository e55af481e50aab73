# expect: converted
# has: print_trainable_parameters
# hasnot: get_memory_footprint
# hasnot: display(
# cause: displays by methods of objects, pandas and IPython
# %%
import pandas as pd
from IPython.display import display, HTML, Markdown
from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
model.get_memory_footprint() / 1e9
model.generation_config
for name, module in model.named_modules():
    print(name, type(module))
model = get_peft_model(model, LoraConfig(r=8))
model.print_trainable_parameters()
# %%
from datasets import load_dataset
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
display(pd.DataFrame(ds[:5]))
ds.to_pandas().describe()
ds.features
display(HTML("<b>ready</b>"))
# %%
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.get_train_dataloader()
next(iter(trainer.get_train_dataloader()))["input_ids"].shape
trainer.train()
