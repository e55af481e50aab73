# expect: refused R0
# cause: SFTTrainer is imported, but no trainer is made: the notebook only tries a model
# %%
from trl import SFTTrainer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("bigcode/starcoderbase-1b")
tok = AutoTokenizer.from_pretrained("bigcode/starcoderbase-1b")
print(tok.decode(model.generate(**tok("def f(", return_tensors="pt"))[0]))
