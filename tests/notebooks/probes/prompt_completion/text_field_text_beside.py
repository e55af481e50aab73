# expect: converted
# cause: rows with text, prompt and completion are prompt/completion rows to TRL
# %%
%%capture
!pip install unsloth
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/gemma-2-2b-bnb-4bit", max_seq_length = 1024, load_in_4bit = True)
model = FastLanguageModel.get_peft_model(model, r = 16, lora_alpha = 16)
# %%
from datasets import load_dataset
def build(row):
    p = f"Q: {row['question']}\nA:"
    c = " " + row["answer"]
    return {"prompt": p, "completion": c, "text": p + c + tokenizer.eos_token}
data = load_dataset("acme/qa-pairs", split = "train").map(build, remove_columns = ["question", "answer"])
# %%
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(model = model, processing_class = tokenizer, train_dataset = data,
    args = SFTConfig(dataset_text_field = "text", per_device_train_batch_size = 2, gradient_accumulation_steps = 4,
                     max_steps = 30, learning_rate = 2e-4, output_dir = "outputs"))
trainer.train()
