# expect: converted
# cause: train_on_responses_only after train() masks nothing that was trained
# %%
from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template, train_on_responses_only
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen2.5-3B", max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=16)
from datasets import load_dataset
ds = load_dataset("acme/stories", split="train").map(lambda x: {"text": x["story"] + tokenizer.eos_token})
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=ds, args=SFTConfig(
    dataset_text_field="text", output_dir="s", max_steps=20))
trainer.train()
# %%
# look at what the mask would have been
trainer = train_on_responses_only(trainer, instruction_part="<|im_start|>user\n", response_part="<|im_start|>assistant\n")
print(trainer.train_dataset[0]["labels"])
