import ast
from pathlib import Path

SAVED = {  # on the main rank, after the training
    "push_merged": ["model.save_pretrained_merged('birds-16bit', tokenizer, save_method='merged_16bit')"],
    "push_gguf": ["model.save_pretrained_gguf('birds-gguf', tokenizer, quantization_method=['q4_k_m', 'q8_0'])"],
    "push_both": [
        "model.save_pretrained_merged('local', tokenizer, save_method='merged_16bit')",
        "model.save_pretrained_gguf('birds', tokenizer, 'q8_0')",
    ],
    "push_peft": ["merged.save_pretrained('birds', max_shard_size='2GB')", "tokenizer.save_pretrained('birds')"],
    "push_var": [
        "model.save_pretrained_merged('runs-merged', tokenizer, save_method='merged_16bit')",
        "model.save_pretrained_merged('four', tokenizer, save_method='merged_4bit_forced')",
        "model.save_pretrained_merged(user.rsplit('/', 1)[-1] + '-merged', tokenizer, 'lora')",
    ],
}


def check(folder: Path, output: str) -> None:
    for name, expected in SAVED.items():
        tree = ast.parse((folder / "converted" / f"{name}.py").read_text(encoding="utf-8"))
        (guard,) = (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "PartialState().is_main_process"
        )
        calls = [node for node in ast.walk(guard) if isinstance(node, ast.Call)]
        made = [ast.unparse(one) for one in calls if "save_pretrained" in ast.unparse(one.func)]
        assert sorted(made) == sorted(expected)
        assert "push_to_hub" not in ast.unparse(tree)
