# expect: converted
# has: packing=True
# cause: Unsloth's notebook of Gemma 4 by FastModel, without its towers, on packs
# %%
from unsloth import FastModel
model, tokenizer = FastModel.from_pretrained(model_name = "unsloth/gemma-4-E2B-it", max_seq_length = 1024, load_in_4bit = True, full_finetuning = False)
model = FastModel.get_peft_model(model, finetune_vision_layers = False, finetune_language_layers = True, finetune_attention_modules = True, finetune_mlp_modules = True, r = 8, lora_alpha = 8, lora_dropout = 0, bias = "none", random_state = 3407)
# %%
from unsloth.chat_templates import get_chat_template, standardize_data_formats
tokenizer = get_chat_template(tokenizer, chat_template = "gemma-4")
from datasets import load_dataset
dataset = standardize_data_formats(load_dataset("acme/talks", split = "train[:3000]"))
dataset = dataset.map(lambda r: {"text": tokenizer.apply_chat_template(r["conversations"], tokenize = False)})
# %%
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset,
    eval_dataset = None, # Can set up evaluation!
    args = SFTConfig(
        dataset_text_field = "text",
        packing = True,
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 4, # Use GA to mimic batch size!
        warmup_steps = 5,
        max_steps = 60,
        learning_rate = 2e-4,
        optim = "adamw_8bit",
        seed = 3407,
        report_to = "none",
    ),
)
trainer_stats = trainer.train()
