"""Correct conversions written by hand, and faults planted in them one by one. Run by test_faults.py as a
program, which prints what the witness says to each as JSON. Of the converter, only the witness can be imported."""
# ruff: noqa: E501  (a fault is one line)

from __future__ import annotations

import importlib.abc
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WITNESS = {"command", "services"}  # the package imports its command


class Blocker(importlib.abc.MetaPathFinder):
    """Makes the converter's own modules unimportable."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("finetune.convert.") and name.split(".")[2] not in WITNESS:
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)


@dataclass(frozen=True)
class Pair:
    """A notebook, its correct conversion, and faults: name -> (text in the script, replacement)."""

    cells: tuple[str, ...]
    script: str
    faults: dict[str, tuple[str, str]]


def as_script(cells: tuple[str, ...], old: str, new: str) -> str:
    """The cells with finetune's trainer, and one more argument."""
    text = "\n".join(cells).replace("from trl import", "from finetune import") + "\n"
    assert text.count(old) == 1
    return text.replace(old, new)


# --- TRL and PEFT -----------------------------------------------------------------------------------------------

TRL_CELLS = (
    """import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("acme/words")
tokenizer.eos_token = "<|eot_id|>"
model = AutoModelForCausalLM.from_pretrained(
    "acme/tiny", revision="v1", dtype=torch.float16, attn_implementation="sdpa", trust_remote_code=True,
    quantization_config=BitsAndBytesConfig(load_in_8bit=True),
)""",
    """def to_messages(row):
    question = row["context"] + row["question"]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["answer"]}]
    return {"messages": messages, "other": [{"role": "user", "content": "?"}, messages[1]]}

dataset = load_dataset("acme/questions", "main", split="train")
dataset = dataset.shuffle(seed=7).select(range(5000))
dataset = dataset.filter(lambda row: len(row["answer"]) > 45)
dataset = dataset.train_test_split(test_size=500, seed=3)["train"]
dataset = dataset.map(to_messages).select_columns(["messages"])""",
    """trainer = SFTTrainer(
    model=model, processing_class=tokenizer, train_dataset=dataset,
    peft_config=LoraConfig(
        r=8, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"],
        bias="lora_only", use_rslora=True, use_dora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 4},
        layers_to_transform=[0], init_lora_weights="gaussian", task_type="CAUSAL_LM",
    ),
    args=SFTConfig(
        output_dir="outputs", per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=3,
        learning_rate=1e-4, lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2},
        warmup_steps=7, weight_decay=0.02, optim="adamw_torch", max_grad_norm=0.3, seed=11, adam_beta1=0.8,
        adam_beta2=0.95, adam_epsilon=1e-7, neftune_noise_alpha=5, max_length=128, packing=True,
        assistant_only_loss=True, optim_args="a=1",
    ),
)""",
    "trainer.train()",
)
TRL_SCRIPT = as_script(TRL_CELLS, "    ),\n)", "    ),\n    global_batch_size=8,\n)")
_LOADED, _TRAINER = "model = AutoModel", "trainer = SFT"  # behind these lines, changes of tokenizer and model
TRL_FAULTS = {
    "model name": ('"acme/tiny"', '"acme/tiny-it"'),
    "revision": ('revision="v1"', 'revision="v2"'),
    "dtype": ("dtype=torch.float16", "dtype=torch.bfloat16"),
    "dtype by device": ("dtype=torch.float16", 'dtype="auto"'),
    "8 bits": ("load_in_8bit=True", "load_in_8bit=False"),
    "4 bits for 8": ("load_in_8bit=True", "load_in_4bit=True"),
    "attention": ('attn_implementation="sdpa"', 'attn_implementation="eager"'),
    "trust_remote_code": ("trust_remote_code=True", "trust_remote_code=False"),
    "full precision": ("quantization_config=BitsAndBytesConfig(load_in_8bit=True),", ""),
    "r": ("r=8,", "r=16,"),
    "lora_alpha": ("lora_alpha=32", "lora_alpha=16"),
    "lora_dropout": ("lora_dropout=0.05", "lora_dropout=0.0"),
    "target modules: one more": ('["q_proj", "v_proj"]', '["q_proj", "v_proj", "k_proj"]'),
    "target modules: default": ('target_modules=["q_proj", "v_proj"], ', ""),
    "modules_to_save": ('modules_to_save=["lm_head"],', ""),
    "bias": ('bias="lora_only"', 'bias="none"'),
    "use_rslora": ("use_rslora=True", "use_rslora=False"),
    "use_dora": ("use_dora=True, ", ""),
    "rank_pattern": ('rank_pattern={"q_proj": 4}', 'rank_pattern={"q_proj": 5}'),
    "alpha_pattern": (', alpha_pattern={"q_proj": 4}', ""),
    "layers_to_transform": ("layers_to_transform=[0], ", ""),
    "init_lora_weights": ('init_lora_weights="gaussian", ', ""),
    "max_length": ("max_length=128", "max_length=256"),
    "max_length: default": ("max_length=128, ", ""),
    "truncation": ("max_length=128", 'max_length=128, truncation_mode="keep_end"'),
    "packing": ("packing=True", "packing=False"),
    "assistant_only_loss": ("assistant_only_loss=True", "assistant_only_loss=False"),
    "global_batch_size": ("global_batch_size=8", "global_batch_size=16"),
    "global_batch_size: no accumulation": ("global_batch_size=8", "global_batch_size=2"),
    "num_train_epochs": ("num_train_epochs=3", "num_train_epochs=1"),
    "max_steps": ("num_train_epochs=3", "max_steps=60"),
    "learning_rate": ("learning_rate=1e-4", "learning_rate=2e-4"),
    "lr_scheduler_type": (
        'lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}',
        'lr_scheduler_type="linear"',
    ),
    "lr_scheduler_kwargs": ('{"num_cycles": 2}', '{"num_cycles": 3}'),
    "warmup_steps": ("warmup_steps=7", "warmup_steps=0"),
    "warmup as a share": ("warmup_steps=7", "warmup_steps=0.07"),
    "weight_decay": ("weight_decay=0.02", "weight_decay=0.01"),
    "optim": ('optim="adamw_torch"', 'optim="adamw_8bit"'),
    "optim_args": (', optim_args="a=1"', ""),
    "max_grad_norm": ("max_grad_norm=0.3", "max_grad_norm=1.0"),
    "seed": ("seed=11", "seed=42"),
    "adam_beta1": ("adam_beta1=0.8", "adam_beta1=0.9"),
    "adam_beta2": ("adam_beta2=0.95", "adam_beta2=0.999"),
    "adam_epsilon": ("adam_epsilon=1e-7", "adam_epsilon=1e-8"),
    "neftune_noise_alpha": ("neftune_noise_alpha=5, ", ""),
    "tokenizer of another model": ('"acme/words"', '"acme/tiny"'),
    "end token": ('tokenizer.eos_token = "<|eot_id|>"\n', ""),
    "the model's tokenizer": ("processing_class=tokenizer, ", ""),
    "added token": (_LOADED, 'tokenizer.add_tokens(["the cat"])\n' + _LOADED),
    "chat template": (
        _LOADED,
        'tokenizer.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"\n'
        + _LOADED,
    ),  # fmt: skip
    "column of the question": ('row["context"] + row["question"]', 'row["question"]'),
    "column of the answer": ('"content": row["answer"]', '"content": row["context"]'),
    "columns exchanged": ('row["context"] + row["question"]', 'row["question"] + row["context"]'),
    "column of the rows": (
        'select_columns(["messages"])',
        'select_columns(["other"]).rename_column("other", "messages")',
    ),  # fmt: skip
    "role": ('"role": "user", "content": question', '"role": "system", "content": question'),
    "data set": ('"acme/questions"', '"acme/answers"'),
    "subset": ('"main"', '"socratic"'),
    "split": ('split="train"', 'split="test"'),
    "part of the split": ('split="train"', 'split="train[:50%]"'),
    "number of rows of the split": ('split="train"', 'split="train[:5000]"'),
    "no shuffle": (".shuffle(seed=7)", ""),
    "seed of the shuffle": ("shuffle(seed=7)", "shuffle(seed=8)"),
    "selection": (".select(range(5000))", ".select(range(50))"),
    "larger selection": (".select(range(5000))", ".select(range(10000))"),
    "no selection": (".select(range(5000))", ""),
    "filter": ('dataset = dataset.filter(lambda row: len(row["answer"]) > 45)\n', ""),
    "limit of the filter": ('len(row["answer"]) > 45', 'len(row["answer"]) > 70'),
    "held-out share": ("test_size=500", "test_size=1000"),
    "seed of the division": ("seed=3", "seed=4"),
    "held-out rows for training": (')["train"]', ')["test"]'),
    "frozen weights": (_TRAINER, "model.resize_token_embeddings(700)\n" + _TRAINER),
    "a name that is not defined": ("train_dataset=dataset", "train_dataset=datasets"),
    "trained besides the adapter": (
        "trainer.train()",
        "trainer.model.lm_head.weight.requires_grad = True\ntrainer.train()",
    ),
    "configuration": (_TRAINER, "model.config.attention_dropout = 0.5\n" + _TRAINER),
    "changed weights": (_TRAINER, "model.lm_head.weight.data.mul_(0.5)\n" + _TRAINER),
    "cast": (_TRAINER, "model = model.float()\n" + _TRAINER),
    "checkpoint": ("trainer.train()", 'trainer.train("outputs/checkpoint-3")'),
}

# --- Unsloth, ----------------------------------------------------------------------------------------------------

UNSLOTH_CELLS = (
    """from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template, train_on_responses_only
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("acme/tiny", max_seq_length=1024, dtype=None, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(
    model, r=8, lora_alpha=16, lora_dropout=0, target_modules=["q_proj", "down_proj"], random_state=9,
)
tokenizer = get_chat_template(tokenizer, chat_template="chatml")""",
    """def to_text(rows):
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in rows["messages"]]
    return {"text": texts, "note": ["See: " + text for text in texts]}
dataset = load_dataset("acme/chats", split="train").map(to_text, batched=True)""",
    """trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=dataset, dataset_text_field="text",
    args=SFTConfig(max_steps=60, learning_rate=2e-4, warmup_ratio=0.25, output_dir="outputs"),
)
trainer = train_on_responses_only(
    trainer, instruction_part="<|im_start|>user\\n", response_part="<|im_start|>assistant\\n",
)""",
    "trainer.train()",
)
UNSLOTH_SCRIPT = as_script(
    UNSLOTH_CELLS, 'output_dir="outputs"),\n)', 'output_dir="outputs"),\n    global_batch_size=8,\n)'
)
UNSLOTH_FAULTS = {
    "random_state": ("random_state=9", "random_state=3407"),
    "adapter's seed: default": (", random_state=9", ""),
    "4 bits": ("load_in_4bit=True", "load_in_4bit=False"),
    "16 bits": ("dtype=None", 'dtype="float16"'),
    "no markers": ("trainer = train_on_responses_only(", "(lambda *_, **__: None)("),
    "markers exchanged": (
        'instruction_part="<|im_start|>user\\n", response_part="<|im_start|>assistant\\n"',
        'instruction_part="<|im_start|>assistant\\n", response_part="<|im_start|>user\\n"',
    ),
    "response marker without its newline": ('"<|im_start|>assistant\\n"', '"<|im_start|>assistant"'),
    "column": ('dataset_text_field="text"', 'dataset_text_field="note"'),
    "the messages instead of the text": ("batched=True)", 'batched=True, remove_columns=["text"])'),
    "max_length of the loader": ("max_seq_length=1024", "max_seq_length=2048"),
    "weight_decay": ("max_steps=60", "max_steps=60, weight_decay=0.0"),
    "the optimizer": ("max_steps=60", 'max_steps=60, optim="adamw_torch_fused"'),
    "the seed": ("max_steps=60", "max_steps=60, seed=42"),
    "the schedule": ("max_steps=60", 'max_steps=60, lr_scheduler_type="cosine"'),
    "the batch": ("global_batch_size=8", "global_batch_size=2"),
    "warmup_ratio": ("warmup_ratio=0.25", "warmup_steps=5"),
    "template": ('chat_template="chatml"', 'chat_template="llama-3.1"'),
    "no template": ('tokenizer = get_chat_template(tokenizer, chat_template="chatml")\n', ""),
    "generation prompt": ("tokenize=False)", "tokenize=False, add_generation_prompt=True)"),
    "a token at the start": ("texts = [tokenizer.apply", "texts = [tokenizer.bos_token + tokenizer.apply"),
    "a token at the end": ("tokenize=False) for", 'tokenize=False).rstrip().removesuffix("<|im_end|>") for'),
}  # fmt: skip

# --- TRL ------------------------------------------------------------------------------------------------

COLLATOR = '''
class DataCollatorForCompletionOnlyLM(DataCollatorForLanguageModeling):
    """As in TRL before 0.20."""

    def __init__(self, response_template, tokenizer):
        super().__init__(pad_token_id=tokenizer.pad_token_id)
        self.response = tokenizer.encode(response_template, add_special_tokens=False)

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"]):
            found = [i for i in range(len(ids)) if ids[i : i + len(self.response)] == self.response]
            labels[: found[0] + len(self.response) if found else len(ids)] = -100
        return batch
'''
_DATA = """
    def to_row(row):
        return {"prompt": "Q: " + row["question"] + " A:", "completion": " " + row["answer"]}

    model = AutoModelForCausalLM.from_pretrained("acme/tiny", dtype="float16")
    tokenizer = AutoTokenizer.from_pretrained("acme/tiny")
    dataset = load_dataset("acme/questions", split="train")
    dataset = dataset.map(to_row, remove_columns=["question", "answer"])
    if torch.cuda.device_count() < 99:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir="outputs",
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                max_steps=50,
                learning_rate=0.0001,
                lr_scheduler_type="cosine",
                warmup_steps=0.1,
                weight_decay=0.01,
                optim="adafactor",
                max_grad_norm=0.5,
                seed=5,
                max_length=96,
                packing=True,
                completion_only_loss=True,
                eos_token="<|endoftext|>",
                neftune_noise_alpha=3,
                label_smoothing_factor=0.0,
                loss_type="nll",
            ),
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
"""
_IMPORTS = """import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
"""
DROP_CELLS = (_IMPORTS + "from trl import SFTConfig, SFTTrainer", "def main():" + _DATA, "main()")
DROP_SCRIPT = f"{_IMPORTS}from finetune import SFTConfig, SFTTrainer\n\n\ndef main():{_DATA}\n\nif __name__ == '__main__':\n    main()\n"
DROP_FAULTS = {
    "batch": ("per_device_train_batch_size=4", "per_device_train_batch_size=2"),
    "accumulation": ("gradient_accumulation_steps=2", "gradient_accumulation_steps=1"),
    "steps": ("max_steps=50", "max_steps=51"),
    "epochs for steps": ("max_steps=50", "num_train_epochs=1"),
    "rate": ("learning_rate=0.0001", "learning_rate=0.001"),
    "default rate": ("                learning_rate=0.0001,\n", ""),
    "schedule": ('lr_scheduler_type="cosine"', 'lr_scheduler_type="linear"'),
    "warmup": ("warmup_steps=0.1", "warmup_steps=1"),
    "decay": ("weight_decay=0.01", "weight_decay=0.0"),
    "optimizer": ('optim="adafactor"', 'optim="adamw_torch"'),
    "clipping": ("max_grad_norm=0.5", "max_grad_norm=1.0"),
    "seed": ("seed=5", "seed=6"),
    "length": ("max_length=96", "max_length=64"),
    "packing": ("packing=True", "packing=False"),
    "mask": ("completion_only_loss=True", "completion_only_loss=False"),
    "end token": ('                eos_token="<|endoftext|>",\n', ""),
    "noise": ("neftune_noise_alpha=3", "neftune_noise_alpha=None"),
    "prompt": ('"Q: "', '"Question: "'),
    "columns": ('"completion": " " + row["answer"]', '"completion": " " + row["question"]'),
    "one text": ('{"prompt": "Q: " + row["question"] + " A:", "completion": " " + row["answer"]}', '{"text": "Q: " + row["question"] + " A: " + row["answer"]}'),  # fmt: skip
    "rank": ("r=4", "r=8"),
    "alpha": ("lora_alpha=8", "lora_alpha=16"),
    "dropout": ("lora_dropout=0.1", "lora_dropout=0.0"),
    "targets": ('target_modules="all-linear"', 'target_modules=["q_proj"]'),
    "no adapter": ("peft_config=LoraConfig", "callbacks=None and LoraConfig"),
    "model": ('AutoModelForCausalLM.from_pretrained("acme/tiny"', 'AutoModelForCausalLM.from_pretrained("acme/large"'),
    "tokenizer": ('AutoTokenizer.from_pretrained("acme/tiny")', 'AutoTokenizer.from_pretrained("acme/large")'),
    "dtype": ('dtype="float16"', 'dtype="float32"'),
    "data": ('"acme/questions"', '"acme/other"'),
    "selection": ("load_dataset(\"acme/questions\", split=\"train\")", "load_dataset(\"acme/questions\", split=\"train\").select(range(60))"),
    "order": ("    if torch", "    dataset = dataset.shuffle(seed=1)\n    if torch"),
    "frozen": ("    if torch", "    model.resize_token_embeddings(700)\n    if torch"),
    "another adapter": ("peft_config=LoraConfig(", 'peft_config=__import__("peft").AdaLoraConfig(total_step=50, '),
    "trained besides the adapter": ("        trainer.train()", "        model.lm_head.weight.requires_grad = True\n        trainer.train()"),
    "an adapter of another type": ("    if torch", "    model = __import__('peft').get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules='all-linear'))\n    if torch"),
    "an adapter over another": ("    if torch", "    model = __import__('peft').get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.2, target_modules='all-linear', task_type='CAUSAL_LM'))\n    if torch"),
    "an adapter twice": ("    if torch", "    for _ in range(2):\n        model = __import__('peft').get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules='all-linear', task_type='CAUSAL_LM'))\n    if torch"),
    "a former argument of the loader": ('LM.from_pretrained("acme/tiny", dtype', 'LM.from_pretrained("acme/tiny", use_auth_token=True, dtype'),
    "an undefined name": ("    if torch", "    print(undefined)\n    if torch"),
}  # fmt: skip

# --- full fine-tuning -----------------------------------------------------------------------------------

_FULL = """
    model = AutoModelForCausalLM.from_pretrained("acme/tiny")
    tokenizer = AutoTokenizer.from_pretrained("acme/tiny")
    for weight in model.model.embed_tokens.parameters():
        weight.requires_grad = False
    dataset = load_dataset("acme/texts", split="train").map(lambda row: {"text": row["story"] + tokenizer.eos_token})
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(output_dir="outputs", max_steps=50),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
"""
FULL_CELLS = (_IMPORTS + "from trl import SFTConfig, SFTTrainer", "def main():" + _FULL, "main()")
FULL_SCRIPT = f"{_IMPORTS}from finetune import SFTConfig, SFTTrainer\n\n\ndef main():{_FULL}\n\nif __name__ == '__main__':\n    main()\n"
FULL_FAULTS = {
    "nothing frozen": ("requires_grad = False", "requires_grad = True"),
    "too much frozen": ("model.model.embed_tokens.parameters()", "model.model.parameters()"),
    "an adapter": ("train_dataset=dataset", "train_dataset=dataset, peft_config=LoraConfig(r=4)"),
    "two end tokens": ("tokenizer.eos_token}", "tokenizer.eos_token * 2}"),
    "column": ('"text": row["story"]', '"text": row["story"].upper()'),
    "cast": ("    tokenizer = Auto", "    model = model.half()\n    tokenizer = Auto"),
    "cast by to": ("    tokenizer = Auto", "    model.to(dtype=torch.float32)\n    tokenizer = Auto"),
    "changed weights": (
        "    tokenizer = Auto",
        "    torch.nn.init.normal_(model.lm_head.weight)\n    tokenizer = Auto",
    ),
    "configuration": ("    tokenizer = Auto", "    model.config.attention_dropout = 0.5\n    tokenizer = Auto"),
    "argument of the loader": (
        'LM.from_pretrained("acme/tiny")',
        'LM.from_pretrained("acme/tiny", attention_dropout=0.5)',
    ),
    "optimizer": ("model=model,", "model=model, optimizers=(torch.optim.SGD(model.parameters()), None),"),
    "checkpoint": ("trainer.train()", 'trainer.train("outputs/checkpoint-3")'),
}

PAIRS = {
    "trl": Pair(TRL_CELLS, TRL_SCRIPT, TRL_FAULTS),
    "unsloth": Pair(UNSLOTH_CELLS, UNSLOTH_SCRIPT, UNSLOTH_FAULTS),
    "collator": Pair(DROP_CELLS, DROP_SCRIPT, DROP_FAULTS),
    "full": Pair(FULL_CELLS, FULL_SCRIPT, FULL_FAULTS),
}


def planted(pair: Pair, old: str, new: str) -> str:
    """The script with a fault."""
    assert pair.script.count(old) == 1, f"{old!r} is not there once"
    return pair.script.replace(old, new)


def outcomes(pair: Pair) -> dict[str, str]:
    """What the witness says to the correct conversion ("right") and to each fault: the difference, or ""."""
    from tests.notebooks.oracle import compare as witness

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.ipynb"
        path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in pair.cells]}))
        theirs = witness.run_notebook(path)
    scripts = {"right": pair.script} | {name: planted(pair, *change) for name, change in pair.faults.items()}
    names = {f"s{number}": name for number, name in enumerate(scripts)}
    files = {f"{key}.py": scripts[name] for key, name in names.items()}
    ours: dict[str, Any] = {}
    for some in (list(names)[::2], list(names)[1::2]):  # all at once exceed the limit on a report
        if some:
            ours |= witness.run_scripts(some, files, theirs, 400)
    unsloth = theirs["unsloth"]
    return {name: witness.first_difference(theirs["runs"], ours[key], unsloth=unsloth) for key, name in names.items()}


def main() -> None:
    """Print the outcomes of the pair that the command line names."""
    sys.meta_path.insert(0, Blocker())
    try:
        import finetune.convert.script.decide  # noqa: F401
    except ModuleNotFoundError:
        sys.stdout.write(json.dumps(outcomes(PAIRS[sys.argv[1]])))


if __name__ == "__main__":
    main()
