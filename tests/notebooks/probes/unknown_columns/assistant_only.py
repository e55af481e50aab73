# expect: converted
# cause: assistant_only_loss=True is what the notebook asks for
# %%
from datasets import load_dataset
from trl import SFTTrainer, SFTConfig
conversations = load_dataset("HuggingFaceH4/ultrachat_200k", split="train_sft[:1%]")
config = SFTConfig(assistant_only_loss=True, output_dir="smol-chat", max_length=2048, packing=False)
trainer = SFTTrainer(model="HuggingFaceTB/SmolLM3-3B", args=config, train_dataset=conversations)
trainer.train()
