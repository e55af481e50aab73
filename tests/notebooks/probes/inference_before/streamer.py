# expect: converted
# hasnot: TextStreamer
# cause: a streamer prints an answer of the base model with autocast
# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, GenerationConfig
tokenizer = AutoTokenizer.from_pretrained("mistralai/Mistral-7B-Instruct-v0.2")
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-Instruct-v0.2", torch_dtype=torch.bfloat16)
gen_cfg = GenerationConfig(max_new_tokens=80, do_sample=True, temperature=0.7)
with torch.inference_mode(), torch.autocast("cuda"):
    ids = tokenizer("[INST] Wie geht es dir? [/INST]", return_tensors="pt").input_ids.cuda()
    _ = model.generate(ids, generation_config=gen_cfg, streamer=TextStreamer(tokenizer))
# %%
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
trainer = SFTTrainer(model, train_dataset=ds, processing_class=tokenizer, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
