# expect: converted
# hasnot: push_to_hub
# says: push_to_hub
# cause: the merged model is loaded again and pushed, which is left out; its tokenizer is not pushed alone
# %%
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
ds = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
args = SFTConfig(output_dir="shop", dataset_text_field="text")
trainer = SFTTrainer(model, processing_class=tokenizer, train_dataset=ds, peft_config=LoraConfig(r=8), args=args)
trainer.train()
trainer.save_model()
# %%
again = AutoPeftModelForCausalLM.from_pretrained(args.output_dir)
merged = again.merge_and_unload()
repo = "anna/" + "shop-merged"
merged.push_to_hub(repo)
tokenizer.push_to_hub(repo)
