# expect: refused R0
# cause: a training loop by hand
# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler
from torch.utils.data import DataLoader
model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(3):
    for batch in DataLoader([], batch_size=4):
        loss = model(**batch).loss
        loss.backward(); opt.step(); opt.zero_grad()
