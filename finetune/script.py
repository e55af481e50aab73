"""Entry point for custom training scripts, which provide functions; settings come from a YAML file next to the script.

    from finetune import script

    def build_dataset(tokenizer):
        from datasets import load_dataset
        return load_dataset("json", data_files="my.json", split="train")

    if __name__ == "__main__":
        raise SystemExit(script.run(__file__, dataset=build_dataset))

`accelerate launch my.py` then trains on any number of ranks, like `finetune.train`, and `python my.py --dry-run` tests
it on one device. Import torch, unsloth, transformers and datasets inside the functions: this program must select the
device and apply its patches before they are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from finetune.config import help_text
from finetune.errors import UserError
from finetune.runtime import scripts
from finetune.runtime.command import load_config, run_with_options
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
    """Train with the settings of the YAML file (SCRIPT.yaml, or the one given by `--config`) and of the command line.

    Args:
        file: the script's `__file__`.
        dataset: takes the tokenizer; returns rows in one of the formats of `data.format` (a `datasets.Dataset` or any
            iterable of mappings), or a pair (training rows, held-out rows). Called once per machine; the result is
            cached until the script, a data file it names, the tokenizer or the data settings change. Not called if
            `data.train_file` or `data.dataset_name` is set.
        tokenizer: takes the tokenizer after it is loaded, on every rank; may return a replacement.
        model: takes the model with its adapter, and the tokenizer, on every rank; may return a replacement.
        trainer: takes the trainer after it is built, on every rank, for example to add callbacks.
        save: takes the trained model and the tokenizer, for exports. Called on the main rank only, after the final
            model is in training.output_dir and the other ranks have exited, so it may take long.

    Returns:
        The exit code for the process: 0 done, 1 failed, 2 bad configuration or input, 130 interrupted.
    """
    script = Path(file).resolve()
    hooks = Hooks(script=script, dataset=dataset, tokenizer=tokenizer, model=model, trainer=trainer, save=save)
    return run_with_options(help_text(script.name), None, lambda argv: _run(argv, hooks, script))


def _run(argv: Sequence[str], hooks: Hooks, script: Path) -> int:
    if not any(argument.partition("=")[0] == "--config" for argument in argv):
        default = script.with_suffix(".yaml")
        if not default.is_file():
            raise UserError(f"settings file of {script.name} not found: {default}. Create it or give --config.")
        argv = ["--config", str(default), *argv]
    config = load_config(list(argv), script=script.name if hooks.dataset else None)
    if config.demo:
        raise UserError(f"{config.config_file} names no model for {script.name}. Set model.model_name_or_path.")
    scripts.answer_configuration(config, hooks)
    from finetune import train

    return train.run(config, hooks=hooks)
