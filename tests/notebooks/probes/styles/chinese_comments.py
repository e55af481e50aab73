# expect: converted
# cause: a tutorial in Chinese: comments, names and prompts
# %% [markdown]
# ## 微调 Qwen 模型
# %%
# 加载模型和分词器
from transformers import AutoModelForCausalLM, AutoTokenizer
模型名 = "Qwen/Qwen2.5-0.5B"
分词器 = AutoTokenizer.from_pretrained(模型名, trust_remote_code=True)
模型 = AutoModelForCausalLM.from_pretrained(模型名, trust_remote_code=True)
# %%
from datasets import load_dataset
def 处理(样本):
    """把问题和答案拼接起来"""
    return {"text": f"问：{样本['问题']}\n答：{样本['答案']}{分词器.eos_token}"}
数据 = load_dataset("json", data_files="数据.jsonl", split="train").map(处理)
# %%
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
训练器 = SFTTrainer(model=模型, train_dataset=数据, processing_class=分词器, peft_config=LoraConfig(r=8),
    args=SFTConfig(output_dir="输出", dataset_text_field="text", per_device_train_batch_size=4, gradient_accumulation_steps=4))
训练器.train()  # 开始训练
