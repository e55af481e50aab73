"""Entry point for custom training scripts: the script's functions, and the settings in the YAML file beside it.

    from finetune import script

    def build_dataset(tokenizer):
        from datasets import load_dataset
        return load_dataset("json", data_files="my.json", split="train")

    if __name__ == "__main__":
        raise SystemExit(script.run(__file__, dataset=build_dataset))

`accelerate launch my.py` then trains on any number of ranks, as `finetune.train` does, and `python my.py --dry-run`
tests it on one device. Import torch, unsloth, transformers and datasets inside the functions: this program chooses the
device and applies its patches before it imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from finetune.config import help_text
from finetune.errors import UserError
from finetune.runtime.command import run_with_options
from finetune.runtime.hooks import Hooks


def run(
    file: str,
    *,
    dataset: Callable[[Any], Any] | None = None,
    tokenizer: Callable[[Any], Any] | None = None,
    model: Callable[[Any, Any], Any] | None = None,
    trainer: Callable[[Any], Any] | None = None,
    save: Callable[[Any, Any], Any] | None = None,
) -> int:
    """Train with the settings of the YAML file named like the script (or by `--config`) and of the command line.

    Args:
        file: the script's `__file__`.
        dataset: gets the tokenizer; returns rows in one of the formats of `data.format` (a `datasets.Dataset` or any
            iterable of mappings), or a pair (training rows, held-out rows). Called once per machine; the result is kept
            until the script, a file that it names, the tokenizer or the settings of the data change.
            `data.train_file` or `data.dataset_name` replaces it.
        tokenizer: gets the tokenizer, after it is loaded, on every rank; may return another one.
        model: gets the model with its adapter, and the tokenizer, on every rank; may return another model.
        trainer: gets the trainer, after it is built, on every rank; to add callbacks.
        save: gets the trained model and the tokenizer, after the final model is in training.output_dir; called by the
            main rank only, after the other ranks have ended: for exports, which may take long.

    Returns:
        The exit code of the process: 0 done, 1 failed, 2 bad configuration or input, 130 interrupted.
    """
    script = Path(file).resolve()
    hooks = Hooks(script=script, dataset=dataset, tokenizer=tokenizer, model=model, trainer=trainer, save=save)
    return run_with_options(help_text(script.name), None, lambda argv: _run(argv, hooks, script))


def _run(argv: Sequence[str], hooks: Hooks, script: Path) -> int:
    from finetune.config import load

    if not any(argument.partition("=")[0] == "--config" for argument in argv):
        beside = script.with_suffix(".yaml")
        if not beside.is_file():
            raise UserError(f"{script.name} has its settings in {beside}, which does not exist; --config names others")
        argv = ["--config", str(beside), *argv]
    config = load(list(argv), script=script.name if hooks.dataset else None)
    if config.demo:
        raise UserError(f"{config.config_file} names no model for {script.name}: set model.model_name_or_path.")
    from finetune import train

    return train.run(config, hooks=hooks)
