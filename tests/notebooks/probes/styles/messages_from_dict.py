# expect: converted
# cause: conversations written out in the notebook; TRL trains all tokens of messages
# %%
from datasets import Dataset
chats = {"messages": [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy!"}],
    [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Fair winds!"}],
]}
pirate = Dataset.from_dict(chats)
# %%
from unsloth import FastModel
model, tokenizer = FastModel.from_pretrained("unsloth/gemma-3-270m-it", max_seq_length=512, load_in_4bit=False, full_finetuning=True)
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, processing_class=tokenizer, train_dataset=pirate, args=SFTConfig(output_dir="pirate", num_train_epochs=5, learning_rate=5e-5)).train()
