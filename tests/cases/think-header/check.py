from pathlib import Path

from tests.cases.rows import marked_rows

PROMPT = "<|im_start|>user\nHow much is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "Two and two make four.\n</think>"


def check(folder: Path, output: str) -> None:
    """Supervised is what follows the common part of prompt and turn, and of thinking that is masked what follows it."""
    answer = "\n\nIt is 4.<|im_end|>"
    for cache, turn in {
        "plain": "<think>[[</think>It is 4.<|im_end|>]]\n",
        "thinking": f"<think>\n[[{THOUGHT}{answer}]]\n",
        "closing": f"<think>\n[[{THOUGHT}{answer}]]\n",
        "masked": f"<think>\n{THOUGHT}[[{answer}]]\n",
        "chatml": f"{THOUGHT}[[{answer}]]\n",
    }.items():
        assert marked_rows(folder, cache) == [PROMPT + turn], cache
