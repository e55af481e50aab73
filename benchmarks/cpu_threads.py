"""Measures the speed of training on a CPU with one thread and with all cores, with sleeping and with spinning threads.

    python -m benchmarks.cpu_threads --seconds 8 --busy 2

Both thread counts take turns every half second in the same process, so that other load on the machine is the same for
both; `ratio` is the median over these pairs. `finetune/runtime/machine/cpu_threads.py` has the rule that follows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

# hidden, intermediate, layers, heads, vocabulary; rows and tokens of a micro-batch
SHAPES = {
    "1m": ((64, 128, 2, 4, 8192), (16, 64)),
    "demo": ((128, 256, 4, 4, 400), (64, 48)),
    "10m": ((256, 768, 6, 8, 8192), (8, 128)),
    "60m": ((512, 1536, 12, 8, 16384), (4, 128)),
}


def main() -> None:
    """Print one line of JSON per shape and policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8, help="per shape and policy")
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside it")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.measure, asked.seconds)
        return
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(asked.busy)]
    try:
        for name in SHAPES:
            for policy in ("PASSIVE", "ACTIVE"):
                command = [sys.executable, "-m", "benchmarks.cpu_threads", "--measure", name]
                env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
                env |= {"OMP_WAIT_POLICY": policy}
                subprocess.run([*command, "--seconds", str(asked.seconds)], env=env, check=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(name: str, seconds: float) -> None:
    """Train one shape for so many seconds, and print tokens/s by threads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    (hidden, intermediate, layers, heads, vocabulary), (rows, tokens) = SHAPES[name]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, vocabulary, (rows, tokens))
    all_cores = torch.get_num_threads()
    rates: dict[int, list[float]] = {1: [], all_cores: []}

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for threads, found in rates.items():
            torch.set_num_threads(threads)
            step()
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < 0.5:
                step()
                count += 1
            found.append(count * rows * tokens / (time.perf_counter() - began))
    line = {
        "shape": name,
        "policy": os.environ["OMP_WAIT_POLICY"],
        "tokens_per_second": {threads: round(median(found)) for threads, found in rates.items()},
        "ratio": round(median(many / one for one, many in zip(rates[1], rates[all_cores], strict=True)), 2),
        "pairs": len(rates[1]),
        "load": round(os.getloadavg()[0], 1),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
