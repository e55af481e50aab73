# expect: converted
# cause: Unsloth's older FastLlamaModel and FastMistralModel load text models
# %%
from unsloth import FastLlamaModel
model, tokenizer = FastLlamaModel.from_pretrained(model_name="unsloth/llama-2-7b-bnb-4bit", max_seq_length=2048, dtype=None, load_in_4bit=True)
model = FastLlamaModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj"], lora_alpha=16, use_gradient_checkpointing=True, random_state=3407)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("acme/code", split="train").map(lambda r: {"text": r["a"]})
SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(output_dir="o", dataset_text_field="text")).train()
