# expect: refused R4
# says: leave out the `as`
# cause: a tracker whose run has no form that does nothing, in a with that names it
# %%
import mlflow
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# %%
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
rows = load_dataset("acme/birds", split="train").map(lambda row: {"text": row["song"]})
args = SFTConfig(output_dir="out", max_steps=20)
with mlflow.start_run() as run:
    SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer).train()
    print(run.info.run_id)
