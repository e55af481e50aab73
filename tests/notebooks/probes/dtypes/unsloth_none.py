# expect: converted
# cause: dtype = None is Unsloth's automatic choice
# %%
from unsloth import FastLanguageModel, is_bfloat16_supported
dtype = None # None for auto detection. Float16 for Tesla T4, V100, Bfloat16 for Ampere+
model, tokenizer = FastLanguageModel.from_pretrained(model_name = "unsloth/Phi-3-mini-4k-instruct", max_seq_length = 2048, dtype = dtype, load_in_4bit = True)
model = FastLanguageModel.get_peft_model(model, r = 16, target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"], lora_alpha = 16)
from datasets import load_dataset
ds = load_dataset("acme/t", split = "train").map(lambda r: {"text": r["a"]})
from trl import SFTTrainer
from transformers import TrainingArguments
trainer = SFTTrainer(model = model, tokenizer = tokenizer, train_dataset = ds, dataset_text_field = "text", max_seq_length = 2048, packing = False,
    args = TrainingArguments(per_device_train_batch_size = 2, gradient_accumulation_steps = 4, max_steps = 60, fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(), optim = "adamw_8bit", output_dir = "outputs"))
trainer.train()
