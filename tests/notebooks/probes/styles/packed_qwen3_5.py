# expect: converted
# has: packing=True
# cause: Unsloth's notebook of Qwen3.5, whose loader returns a processor, on packs
# %%
from unsloth import FastLanguageModel
model, processor = FastLanguageModel.from_pretrained("unsloth/Qwen3.5-35B-A3B", max_seq_length = 2048, load_in_4bit = False, fast_inference = False)
tokenizer = processor.tokenizer # To tokenize text
model = FastLanguageModel.get_peft_model(model, r = 8, target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"], lora_alpha = 16, use_gradient_checkpointing = True, random_state = 3407, bias = "none")
# %%
from datasets import load_dataset
dataset = load_dataset("acme/math", split = "cot")
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
