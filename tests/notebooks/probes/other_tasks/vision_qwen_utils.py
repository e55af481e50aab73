# expect: refused R3
# cause: Qwen's VL utilities and a fully qualified class name
# %%
import transformers, torch
from qwen_vl_utils import process_vision_info
model = transformers.Qwen2VLForConditionalGeneration.from_pretrained("Qwen/Qwen2-VL-2B-Instruct", torch_dtype=torch.bfloat16)
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("HuggingFaceM4/ChartQA", split="train[:10%]")
SFTTrainer(model=model, train_dataset=ds, args=SFTConfig(output_dir="o")).train()
