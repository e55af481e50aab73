"""The script's side of the witness: prepares its rows and arguments with the package, in the sandbox.

`side.py` gives it a job and writes its answer: settings, token ids and labels. The converter cannot be imported here.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import sys
import types
from typing import Any, TypeAlias

Values: TypeAlias = dict[str, Any]  # by name: arguments, columns of a row, or the parts of a report


def execute(path: str) -> None:
    """Run a script as the main program."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"], sys.argv = module, [path]
    module.__dict__["__builtins__"] = vars(builtins) | {"__import__": _import}
    with open(path, encoding="utf-8") as stream:
        tree = ast.parse(stream.read(), path)
    tries = [one for node in ast.walk(tree) if isinstance(node, ast.Try) for one in node.body]
    inside = (one for outer in tries for one in ast.walk(outer))
    tried.update(one.lineno for one in inside if isinstance(one, ast.Import | ast.ImportFrom))
    try:
        exec(compile(tree, path, "exec"), module.__dict__)
    except SystemExit:
        pass


tried: set[int] = set()  # the lines of a script whose imports may fail


def _import(name: str, *given: Any, **named: object) -> object:
    """A package that the script imports and that is not installed here is what it is for the notebook."""
    try:
        return builtins.__import__(name, *given, **named)
    except ModuleNotFoundError as error:
        of_package = (error.name or "").partition(".")[0] == name.partition(".")[0]
        if not of_package or name.startswith(("finetune", "patches")) or sys._getframe(1).f_lineno in tried:
            raise
        return sys.modules["stand_ins"].missing_package(name if given[2:] and given[2] else name.partition(".")[0])


def reached(job: Values, stand_ins: types.ModuleType) -> Values:
    """A script with `finetune.SFTTrainer`, up to `train()`."""
    from finetune.data.templates import render
    from finetune.drop_in import refusals
    from finetune.drop_in import trainer as drop_in

    render.resource = None  # type: ignore[assignment]  # a confined process may not change its limits, and has some
    cls: Any = drop_in.SFTTrainer
    found: list[Any] = []
    build = cls.__init__
    names = list(inspect.signature(build).parameters)[1:]

    def init(self: Any, *positional: Any, **given: Any) -> None:
        model = positional[0] if positional else given.get("model")
        config, held = given.pop("peft_config", None), stand_ins.record.get("lora")
        if config is not None and held is not None:
            more = stand_ins.record.get("adapter", {})
            if stand_ins.adapter(config.to_dict()) != held or not stand_ins.record["adapter"].items() <= more.items():
                raise ValueError("the trainer is given a `PeftModel` and another `peft_config`")  # as TRL does
            stand_ins.record["adapter"] = more
        if held is None:
            stand_ins.record_adapter(config, model)
        stand_ins.record["own functions"] = stand_ins.own_functions(given)
        stand_ins.record["batch"] = given.get("global_batch_size")
        stand_ins.record_trainer(dict(zip(names, positional, strict=False)) | given)
        build(self, *positional, **given)

    def train(self: Any, resume_from_checkpoint: object = None, *_: object, **__: object) -> None:
        stand_ins.record["checkpoint"] = stand_ins.checkpoint(resume_from_checkpoint)
        refusals.check_unchanged(self, self._created_with)  # as the trainer does
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
    more["global batch"] = trainer.job.batch.global_batch_size
    tokenizer = trainer.processing_class
    return {
        "settings": stand_ins.settings(trainer.given) | more,
        "model": stand_ins.model_settings(trainer.model, tokenizer, job["unsloth"]),
        "lora": stand_ins.record.get("lora"),
        "given": stand_ins.given(stand_ins.arguments(trainer.given), tokenizer),
        "rows": tokenized(trainer.job.data.train, stand_ins),
        "eos": tokenizer.eos_token_id,
    }


def tokenized(rows: Any, stand_ins: types.ModuleType) -> list[object]:
    found = (stand_ins.row(*rows[index]) for index in range(len(rows)))
    return [row for row in found if row]


def answer(job: Values, stand_ins: Any) -> Values:
    """Run the script of a job with each set of columns."""
    sys.meta_path[:0] = [
        stand_ins.Blocker("finetune.convert"),
        stand_ins.From(job["packages"], "finetune", "patches"),
    ]
    stand_ins.today = True
    stand_ins.prepare(job["unsloth"], template=job["template"])
    stand_ins.replace_configs(job["unsloth"])
    for name, text in job["files"].items():
        with open(name, "w", encoding="utf-8") as stream:
            stream.write(text)
    return {
        name: [_one(job, name, number, columns, stand_ins) for number, columns in enumerate(job["columns"])]
        for name in job["names"]
    }


def _with_variables(run: Any, columns: dict[str, str], stand_ins: types.ModuleType) -> Values:
    """The result of a script, whose environment variables are set as the notebook's are."""
    while True:
        stand_ins.record.clear()
        stand_ins.seed()
        stand_ins.columns.clear()
        stand_ins.columns.update(columns)
        stand_ins.files.clear()
        try:
            return run()
        except Exception as error:
            variable = stand_ins.missing_variable(error)
            if variable is None or variable in os.environ:
                raise
            os.environ[variable] = "none"


def _one(job: Values, name: str, number: int, columns: dict[str, str], stand_ins: Any) -> Values:
    """One script with one set of columns; `refused` if the package refuses its rows or settings."""
    from finetune.errors import RunError, UserError

    os.environ["FINETUNE_CACHE"] = os.path.abspath(f"cache-{name}-{number}")
    stand_ins.by_line = "json.load(" not in job["files"][f"{name}.py"]
    stand_ins.empty = job["empty"][number]
    try:
        return _with_variables(lambda: reached(job | {"name": name}, stand_ins), columns, stand_ins) | {
            "columns": columns
        }
    except (UserError, RunError) as error:
        return {"refused": str(error)[:600]}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {str(error)[:200]}"}
