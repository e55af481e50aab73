# expect: converted
# has: packing=True
# cause: Unsloth's notebook of LFM2, whose projections have names of their own, on packs
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained(model_name = "unsloth/LFM2.5-1.2B-Instruct", max_seq_length = 2048, load_in_4bit = False, full_finetuning = False)
model = FastLanguageModel.get_peft_model(model, r = 16, target_modules = ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"], lora_alpha = 16, lora_dropout = 0, bias = "none", use_gradient_checkpointing = "unsloth", random_state = 3407, use_rslora = False, loftq_config = None)
# %%
from datasets import load_dataset
dataset = load_dataset("acme/talks", split = "train[:3000]")
from unsloth.chat_templates import standardize_data_formats
dataset = standardize_data_formats(dataset)
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
