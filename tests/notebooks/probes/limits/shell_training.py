# expect: refused R0
# cause: the training is a shell line: `!trl sft ...`
# %%
!pip install trl
!trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --output_dir out
# %%
from transformers import pipeline
print(pipeline("text-generation", model="out")("Hi"))
