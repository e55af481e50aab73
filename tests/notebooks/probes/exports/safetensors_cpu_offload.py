# expect: converted
# kept or named: merge
# cause: model moved to CPU and merged in place, then saved by shards
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
from trl import SFTTrainer, SFTConfig
from datasets import load_dataset
tk = AutoTokenizer.from_pretrained("microsoft/phi-2", trust_remote_code=True)
tk.pad_token = tk.eos_token
lm = AutoModelForCausalLM.from_pretrained("microsoft/phi-2", trust_remote_code=True, torch_dtype="auto")
lm = get_peft_model(lm, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "dense"]))
d = load_dataset("acme/t", split="train").map(lambda r: {"text": r["a"]})
tr = SFTTrainer(model=lm, train_dataset=d, processing_class=tk, args=SFTConfig("phi2", dataset_text_field="text"))
tr.train()
# %%
lm = lm.merge_and_unload().to("cpu")
lm.save_pretrained("phi2-merged", max_shard_size="2GB")
