"""Compare `finetune chat --prompts` with transformers' continuous batching: time and greedy answers.

    python -m benchmarks.chat_batching RUN [--prompts FILE] [--max-new-tokens 64] [--batch-size 8] [--repeats 3]

Loads RUN as chat does. Both answer the same tokenized prompts, greedily, with the same end tokens; the first round of
each is not counted. Prints the median seconds of each, and how many answers are equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from transformers import ContinuousBatchingConfig

from finetune.chat import batch, command, load
from finetune.chat.speaker import Manner, Speaker
from finetune.engine import trained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attention", default="paged|sdpa", help="of continuous batching")
    options = parser.parse_args()
    found = trained.find(options.run)
    manner = Manner(max_new_tokens=options.max_new_tokens, temperature=None, greedy=True, seed=0)
    speaker = Speaker(load.load(found), found, manner, system=None, raw=False)
    encoded = [speaker.encode(speaker.opening(one)) for one in command.read_prompts(options.prompts)]
    model, settings = speaker.loaded.model, speaker.settings(options.max_new_tokens)
    usual = model.config._attn_implementation

    def padded() -> list[list[int]]:
        model.set_attn_implementation(usual)
        return [one.text for one in batch.answers(speaker, encoded, options.batch_size)]

    def continuous() -> list[str]:
        model.set_attn_implementation(options.attention)
        found = model.generate_batch(
            inputs=encoded, generation_config=settings, continuous_batching_config=ContinuousBatchingConfig()
        )
        return [
            speaker.loaded.tokenizer.decode(one.generated_tokens, skip_special_tokens=True) for one in found.values()
        ]

    answers, seconds = {}, {}
    for name, ways in (("padded batches", padded), ("continuous batching", continuous)):
        times = []
        for _ in range(options.repeats + 1):
            start = time.perf_counter()
            answers[name] = ways()
            times.append(time.perf_counter() - start)
        seconds[name] = statistics.median(times[1:])
        sys.stdout.write(f"{name}: {seconds[name]:.2f} s for {len(encoded)} prompts\n")
    one, two = answers.values()
    equal = sum(a == b for a, b in zip(one, two, strict=True))
    sys.stdout.write(f"{equal} of {len(encoded)} answers are equal\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
