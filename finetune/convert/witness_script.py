"""The script's side of the witness: prepares its rows and arguments with the package, in the sandbox.

The converter cannot be imported here. It reads a job as JSON from stdin and writes settings, token ids and labels as
JSON to stdout.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
from typing import Any


def hooks_form(job: dict[str, Any], stand_ins: Any) -> dict[str, Any]:
    """A script of functions and its YAML file."""
    from transformers import AutoTokenizer

    from finetune.config import load, resolve_batch
    from finetune.data.prepare import prepare
    from finetune.engine.model import PROJECTIONS, with_padding
    from finetune.engine.trainer import arguments
    from finetune.runtime.bootstrap import Stack
    from finetune.runtime.hooks import Hooks

    path = os.path.abspath(job["name"] + ".py")
    config = load(["--config", path.removesuffix(".py") + ".yaml"], script=job["name"] + ".py")
    functions = captured(path)
    hooks = Hooks(**functions)
    tokenizer = with_padding(hooks.replace("tokenizer", with_padding(AutoTokenizer.from_pretrained("any"))))
    data = prepare(config, tokenizer, hooks)
    backend = "unsloth" if job["unsloth"] else "transformers"
    stack = Stack(backend=backend, reason="", device="cpu", local_rank=0, patches=())
    batch = resolve_batch(config.training, 1, config.data)
    args = arguments(config, stack, batch, evaluate=False)
    lora = None
    if not config.model.full_finetuning:
        values = {name: getattr(config.lora, name, None) for name in stand_ins.ADAPTER} | config.lora.adapter_kwargs
        values["target_modules"] = values["target_modules"] or (
            None if config.model.loader == "FastModel" else list(PROJECTIONS)
        )
        lora = stand_ins.adapter(values)
    bits = 4 if config.model.load_in_4bit else 8 if config.model.load_in_8bit else 16
    more = {"max_length": config.data.max_length, "packing": config.data.packing, "bits per frozen weight": bits}
    return {"settings": stand_ins.settings(args) | more, "lora": lora, "rows": tokenized(data.train, stand_ins)}


def captured(path: str) -> dict[str, Any]:
    """The functions that a script gives to `script.run`."""
    from pathlib import Path

    from finetune import script

    found: dict[str, Any] = {}

    def run(file: str, **functions: Any) -> int:
        found.update(functions, script=Path(file).resolve())
        return 0

    script.run = run
    execute(path)
    return found


def execute(path: str) -> None:
    """Run a script as the main program."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"], sys.argv = module, [path]
    with open(path, encoding="utf-8") as stream:
        code = compile(stream.read(), path, "exec")
    try:
        exec(code, module.__dict__)
    except SystemExit:
        pass


def drop_in_form(job: dict[str, Any], stand_ins: Any) -> dict[str, Any]:
    """A script with `finetune.SFTTrainer`, up to `train()`."""
    from finetune.drop_in import trainer as drop_in

    cls: Any = drop_in.SFTTrainer
    found: list[Any] = []
    build = cls.__init__

    def init(self: Any, *positional: Any, **given: Any) -> None:
        stand_ins.record_adapter(given.pop("peft_config", None))
        build(self, *positional, **given)

    def train(self: Any, *_: Any, **__: Any) -> None:
        found.append(self)
        raise stand_ins.Stop

    cls.__init__, cls.train = init, train
    try:
        execute(os.path.abspath(job["name"] + ".py"))
    except stand_ins.Stop:
        pass
    if not found:
        raise LookupError("the script does not reach train()")
    trainer = found[0]
    more = {"max_length": trainer.given.max_length, "packing": bool(trainer.given.packing)}
    more["bits per frozen weight"] = stand_ins.record.get("bits")
    return {
        "settings": stand_ins.settings(trainer.given) | more,
        "lora": stand_ins.record.get("lora"),
        "rows": tokenized(trainer.job.data.train, stand_ins),
    }


def tokenized(rows: Any, stand_ins: Any) -> list[Any]:
    found = (stand_ins.row(*rows[index]) for index in range(len(rows)))
    return [row for row in found if row]


def answer(job: dict[str, Any], stand_ins: Any) -> dict[str, Any]:
    """Run the script of a job with each set of columns."""
    sys.meta_path[:0] = [
        stand_ins.Blocker("finetune.convert"),
        stand_ins.From(job["packages"], "finetune", "patches"),
    ]
    stand_ins.prepare(job["unsloth"], template=job["template"])
    if job["form"] == "drop-in":
        stand_ins.replace_configs(job["unsloth"])
    for name, text in job["files"].items():
        with open(name, "w", encoding="utf-8") as stream:
            stream.write(text)
    runs = {name: [_one(job, name, columns, stand_ins) for columns in job["columns"]] for name in job["names"]}
    return {"runs": runs}


def _one(job: dict[str, Any], name: str, columns: dict[str, str], stand_ins: Any) -> dict[str, Any]:
    """One script with one set of columns; `refused` if the package refuses its rows or settings."""
    from finetune.errors import RunError, UserError

    os.environ["FINETUNE_CACHE"] = os.path.abspath(f"cache-{name}-{'-'.join(columns)}")
    stand_ins.record.clear()
    stand_ins.seed()
    stand_ins.columns.clear()
    stand_ins.columns.update(columns)
    run = {"settings": hooks_form, "drop-in": drop_in_form}[job["form"]]
    try:
        return run(job | {"name": name}, stand_ins)
    except (UserError, RunError) as error:
        return {"refused": str(error)[:600]}


def load(job: dict[str, Any]) -> Any:
    """The module of the stand-ins, from its source in the job."""
    stand_ins = types.ModuleType("stand_ins")
    sys.modules["stand_ins"] = stand_ins
    exec(compile(job["stand_ins"], "<stand-ins>", "exec"), stand_ins.__dict__)
    return stand_ins


def main() -> None:
    """Answer the job on stdin; what the libraries print is dropped."""
    job, out = json.load(sys.stdin), os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        found = answer(job, load(job))
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-3000:]}
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        json.dump(found, stream)
        stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
