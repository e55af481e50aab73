# expect: refused R0|R5
# cause: a shell script in cells, no training
# %%
%%bash
accelerate launch train.py --model meta-llama/Llama-2-7b-hf --lr 2e-4
# %%
print("done")
