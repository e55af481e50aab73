from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    """As Qwen2.5 and Hermes write it: https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct (tokenizer_config.json)."""
    row = marked_rows(folder, "c")[0]
    assert row.startswith("<|im_start|>system\nYou are a weather bot.\n\n# Tools\n\nYou may call one or more functions")
    assert row.endswith(
        "<|im_start|>user\nWeather in Paris?<|im_end|>\n<|im_start|>assistant\n[[<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>]]\n'
        '<|im_start|>user\n<tool_response>\n{"temp": 10}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n[[It is 10 degrees in Paris.<|im_end|>]]\n"
    )
