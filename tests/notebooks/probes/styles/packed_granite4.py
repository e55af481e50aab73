# expect: converted
# has: packing=True
# cause: Unsloth's notebook of Granite 4, a hybrid with an MLP that all experts share, on packs
# %%
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained(model_name = "unsloth/granite-4.0-h-micro", max_seq_length = 2048, load_in_4bit = False)
model = FastLanguageModel.get_peft_model(model, r = 32, target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "shared_mlp.input_linear", "shared_mlp.output_linear"], lora_alpha = 32, lora_dropout = 0, bias = "none", use_gradient_checkpointing = "unsloth", random_state = 3407)
# %%
from datasets import load_dataset
dataset = load_dataset("acme/talks", split = "train")
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
