"""The notebook's side of the witness: runs its own cells up to `train()`, in the sandbox.

It shares nothing with the converter: the module `finetune` cannot be imported here. `side.py` gives it a job and writes
its answer: the trainer's settings, tokenized rows and labels. The verdict is not made here.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import json
import os
import re
import sys
import types
from typing import Any, TypeAlias

Values: TypeAlias = dict[str, Any]  # by name: arguments, columns of a row, or the parts of a report

TRIES = 16
state: Values = {}
failed: list[str] = []  # every failure of any run: a file that one run writes exists in the next


def read_cells(text: str, name: str) -> list[str]:
    """The code cells, without magics and shell commands."""
    if name.endswith(".py"):
        cells = [text]
    else:
        cells = ["".join(c["source"]) for c in json.loads(text)["cells"] if c.get("cell_type") == "code"]
    return [_python(cell) for cell in cells]


def _python(cell: str) -> str:
    first = cell.lstrip().partition("\n")[0]
    if first.startswith("%%") and not re.match(r"%%(capture|time|timeit)\b", first):
        return ""
    lines, inside = [], False
    for line in _dedented(cell).splitlines():
        bare = line.lstrip()
        if inside or bare.startswith(("!", "%")) or (_AUTOMAGIC.match(bare) and not _is_python(bare)):
            lines.append("" if inside else line[: len(line) - len(bare)] + "pass")
            inside = line.rstrip().endswith("\\")
        else:
            lines.append(line)
    return "\n".join(lines)


# Magics that IPython runs without their percent sign.
_AUTOMAGIC = re.compile(
    r"(pip|pip3|conda|mamba|uv|ls|ll|cd|mkdir|rmdir|rm|cp|mv|cat|less|more|man|env|time|timeit|run|load_ext|matplotlib)"
    r" +[^\s=(\[.,:]"
)


def _is_python(line: str) -> bool:
    try:
        ast.parse(line)
    except SyntaxError as error:
        return "was never closed" in error.msg or error.msg.startswith(("expected", "unterminated"))
    return True


def _dedented(cell: str) -> str:
    """The cell without the indentation of its first line."""
    first = next((line for line in cell.splitlines() if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    return "\n".join(line.removeprefix(indent) for line in cell.splitlines()) if indent else cell


def is_unsloth(cells: list[str]) -> bool:
    """Whether the cells import Unsloth."""
    return any(re.search(r"^[^\S\n]*(from|import) unsloth", cell, re.M) for cell in cells)


# --- arguments of older versions, from the signatures of the installed libraries --------------------------------------

RENAMED = {"evaluation_strategy": "eval_strategy", "max_seq_length": "max_length", "per_gpu_train_batch_size":
           "per_device_train_batch_size", "no_cuda": "use_cpu"}  # fmt: skip


def replace_trainer(unsloth: bool, stand_ins: types.ModuleType) -> None:
    import transformers
    import trl
    import trl.trainer.sft_trainer as sft

    for cls in {trl.SFTTrainer, sft.SFTTrainer}:
        _replace_init(cls, unsloth, stand_ins)
        if unsloth:  # as on a GPU; on a CPU, Unsloth leaves this to TRL
            from unsloth_zoo.dataset_utils import sft_prepare_dataset

            cls._prepare_dataset = sft_prepare_dataset
    originals.update(functions_now(trl.SFTTrainer))

    def train(self: object, resume_from_checkpoint: object = None, *_: object, **__: object) -> None:
        state["trainer"] = self
        own = stand_ins.record.get("own functions", []) + replaced_methods(self)
        if "optimizers" not in own and getattr(self, "lr_scheduler", None) is not None:
            own.append("lr_scheduler")  # made before the training, which then keeps it
        stand_ins.record.update({"own functions": own, "checkpoint": stand_ins.checkpoint(resume_from_checkpoint)})
        raise stand_ins.Stop

    for cls in {trl.SFTTrainer, sft.SFTTrainer, transformers.Trainer}:
        cls.train = train
    library: Any = trl
    library.DataCollatorForCompletionOnlyLM = CompletionOnly
    library.setup_chat_format = setup_chat_format
    transformers.Trainer.tokenizer = property(  # type: ignore[attr-defined]
        lambda self: self.processing_class, lambda self, value: setattr(self, "processing_class", value)
    )  # its name in transformers 4
    if unsloth:  # imported by others, it would change what plain TRL trains with
        package: Any = sys.modules["unsloth"]
        package.unsloth_train = lambda trainer, *_, **__: trainer.train()


def _replace_init(cls: Any, unsloth: bool, stand_ins: types.ModuleType) -> None:
    build = cls.__init__
    names = list(inspect.signature(sft_signature(cls)).parameters)[1:]

    def init(self: Any, *positional: Any, **given: Any) -> None:
        if state.get("building"):
            return build(self, *positional, **given)
        given = dict(zip(names, positional, strict=False)) | given
        state["building"] = True
        try:
            stand_ins.record_trainer(given)
            given = normalized(given, unsloth, stand_ins)
            stand_ins.record_adapter(given.pop("peft_config", None), given.get("model"))
            stand_ins.record["own functions"] = stand_ins.own_functions(given)
            args = given["args"]
            before = stand_ins.settings(args), stand_ins.arguments(args)
            self._packing, self._max_length = bool(args.packing), args.max_length
            args.packing, args.eval_packing = False, None  # documents, which packing only concatenates
            demand_columns(given)
            given.pop("eval_dataset", None)
            args.eval_strategy = "no"
            build(self, **given)
            self._before, self._after = before, (stand_ins.settings(self.args), stand_ins.arguments(self.args))
        finally:
            state["building"] = False

    cls.__init__ = init


METHODS = (
    "compute_loss training_step create_optimizer create_scheduler create_optimizer_and_scheduler get_train_dataloader"
    " _get_train_sampler get_batch_samples _prepare_dataset"
).split()
originals: Values = {}


def functions_now(cls: object) -> Values:
    """The functions that train, which a program may replace."""
    import torch

    return {name: getattr(cls, name, None) for name in METHODS} | {"cross_entropy": torch.nn.functional.cross_entropy}


def replaced_methods(trainer: object) -> list[str]:
    own = [name for name in METHODS if name in vars(trainer)]
    now = functions_now(type(trainer))
    return own + [name for name, value in originals.items() if now[name] is not value]


def sft_signature(cls: Any) -> Any:
    """TRL's own constructor; Unsloth's takes anything."""
    return next(
        c.__dict__["__init__"] for c in cls.__mro__ if "formatting_func" in inspect.signature(c.__init__).parameters
    )


def normalized(given: Values, unsloth: bool, stand_ins: types.ModuleType) -> Values:
    """Arguments of any version of TRL, as those of the installed one."""
    import trl

    given = dict(given)
    if (tokenizer := given.pop("tokenizer", None)) is not None:
        given.setdefault("processing_class", tokenizer)
    args: Any = given.get("args")
    if args is None:
        args = trl.SFTConfig(output_dir="trainer_output")
    elif not isinstance(args, trl.SFTConfig):
        args = trl.SFTConfig(**{k: v for k, v in args.to_dict().items() if k not in stand_ins.ELSEWHERE})
    fields = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    field = given.get("dataset_text_field")
    if isinstance(field, str):  # the trainer's own argument, as in TRL before 0.13, which took this column and no other
        for name in ("train_dataset", "eval_dataset"):
            columns = getattr(given.get(name), "column_names", None) or ()
            if field in columns and "input_ids" not in columns:
                given[name] = given[name].select_columns([field]).rename_columns({field: "text"})
                given["dataset_text_field"] = "text"
    accepted = {"model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "callbacks",
                "compute_metrics", "compute_loss_func", "optimizers", "peft_config", "formatting_func",
                "preprocess_logits_for_metrics", "optimizer_cls_and_kwargs", "quantization_config"}  # fmt: skip
    for key in [key for key in given if key not in accepted]:
        value, key = given.pop(key), RENAMED.get(key, key)
        if key in fields and value is not None and key != "dataset_num_proc":
            setattr(args, key, value)
            if key == "max_length":
                args.__dict__["_has_length"] = True
    args.dataset_num_proc = None
    if given.get("formatting_func") is not None and args.completion_only_loss is None:
        format_prompts(given)
    if given.get("formatting_func") is not None and not unsloth:
        format_batches(given, args)
    loaded = getattr(given.get("model"), "max_seq_length", None) if unsloth else None
    if loaded:
        # Unsloth's generated constructor: the loader's length, unless the arguments have a smaller one. It takes
        # `max_length=1024`, TRL's default, for none, but not `max_seq_length=1024`.
        default = next(field.default for field in dataclasses.fields(trl.SFTConfig) if field.name == "max_length")
        given_length = args.max_length and (args.max_length != default or getattr(args, "_has_length", False))
        explicit = args.max_length if given_length else None
        args.max_length = min(explicit, loaded) if explicit else loaded
    columns = getattr(given.get("train_dataset"), "column_names", None) or ()
    if "completion" in columns and args.dataset_text_field in columns:
        args.dataset_text_field = "completion"  # where the package adds the end token (docs/data.md)
    return given | {"args": args}


def format_prompts(given: Values) -> None:
    """Format rows with prompts, as TRL did before it refused to."""
    rows: Any = given.get("train_dataset")
    function = given["formatting_func"]
    if "prompt" in (getattr(rows, "column_names", None) or ()):
        given["train_dataset"] = rows.map(lambda row: {"text": function(row)}, remove_columns=rows.column_names)
        given["formatting_func"] = None


def format_batches(given: Values, args: Any) -> None:
    """Format rows with a function that takes a batch and returns a list, as TRL did before 0.13."""
    rows, function = given.get("train_dataset"), given["formatting_func"]
    columns = getattr(rows, "column_names", None)
    if not isinstance(columns, list) or "input_ids" in columns or not len(rows):  # type: ignore[arg-type]
        return
    try:
        if not isinstance(function(rows[0]), list):  # type: ignore[index]
            return
    except (IndexError, TypeError, AttributeError):
        pass
    given["train_dataset"] = rows.map(  # type: ignore[union-attr]
        lambda batch: {"text": function(batch)}, batched=True, remove_columns=columns
    )
    given["formatting_func"], args.dataset_text_field = None, "text"


def demand_columns(given: Values) -> None:
    """Ask for a column that TRL reads, if the rows have none."""
    columns = set(getattr(given.get("train_dataset"), "column_names", None) or ())
    field = given["args"].dataset_text_field
    known = {"messages", "prompt", "conversations", "input_ids", field}
    if given.get("formatting_func") is None and not columns & known:
        state["by_trainer"] = field
        raise KeyError(field)


class CompletionOnly:
    """TRL's former DataCollatorForCompletionOnlyLM: trains what follows the last response template, or with an
    instruction template what follows each, up to the next instruction."""

    def __init__(
        self,
        response_template: object,
        instruction_template: object = None,
        *_: object,
        tokenizer: Any = None,
        **__: object,
    ) -> None:
        ids = lambda text: text if not isinstance(text, str) else tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        self.response, self.tokenizer = list(ids(response_template)), tokenizer
        given = [text for text in (instruction_template, response_template) if isinstance(text, str)]
        sys.modules["stand_ins"].record["templates"] = given  # type: ignore[attr-defined]
        self.instruction = None if instruction_template is None else list(ids(instruction_template))

    def __call__(self, rows: Any, return_tensors: object = None) -> Values:
        found = [list(row["input_ids"]) for row in rows]
        return {"input_ids": found, "labels": [self._labels(ids) for ids in found]}

    def _labels(self, ids: list[int]) -> list[int]:
        def places(part: list[int]) -> list[int]:
            return [i for i in range(len(ids)) if ids[i : i + len(part)] == part]

        labels, answers = [-100] * len(ids), places(self.response)
        if self.instruction is None:
            answers = answers[-1:]
        questions = [] if self.instruction is None else places(self.instruction)
        for start in answers:
            start += len(self.response)
            end = min([place for place in questions if place >= start], default=len(ids))
            labels[start:end] = ids[start:end]
        pad = self.tokenizer.pad_token_id if self.tokenizer is not None else None
        return [-100 if pad is not None and label == pad else label for label in labels]


def setup_chat_format(
    model: Any, tokenizer: Any, format: object = "chatml", resize_to_multiple_of: int | None = None
) -> object:
    """TRL's former function: ChatML's template and tokens."""
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    tokenizer.chat_template = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
        " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return model, tokenizer


# --- running ----------------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A statement failed in a way that more columns do not repair."""


def execute(cells: list[str], stand_ins: types.ModuleType) -> object:
    """Run the cells up to `train()`. Returns the trainer; raises KeyError and others for what is missing."""
    stand_ins.record.clear()
    stand_ins.files.clear()
    stand_ins.asked.clear()
    stand_ins.seed()
    state.clear()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = builtins  # the module, not this program's copy
    module.__dict__.update(display=lambda *_, **__: None, get_ipython=stand_ins.Missing)  # as in Jupyter
    failures: list[str] = []
    state["failures"] = failures
    try:
        for number, cell in enumerate(cells):
            try:
                tree = ast.parse(cell)
            except SyntaxError as error:
                failures.append(f"cell {number + 1} is not Python: {error.msg}")
                continue
            for node in tree.body:
                run_statement(node, module.__dict__, failures, number + 1)
                if "trainer" in state:
                    raise stand_ins.Stop
    except stand_ins.Stop:
        return state["trainer"]
    raise Failed("; ".join(failures[:3]) or "no train() is reached")


def is_of_missing(node: ast.stmt, space: Values) -> bool:
    """An assertion about a package that is not installed here."""
    names = (
        {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if isinstance(node, ast.Assert) else set()
    )
    return any(isinstance(space.get(name), sys.modules["stand_ins"].Missing) for name in names)  # type: ignore[attr-defined]


def run_statement(node: ast.stmt, space: Values, failures: list[str], cell: int) -> None:
    try:
        exec(compile(ast.Module([node], []), f"<cell {cell}>", "exec"), space)
    except Exception as error:
        if (variable := sys.modules["stand_ins"].missing_variable(error)) is not None:  # type: ignore[attr-defined]
            os.environ[variable] = "none"
            run_statement(node, space, failures, cell)
            return
        if isinstance(error, AssertionError) and is_of_missing(node, space):
            return
        if isinstance(node, ast.Import) and len(node.names) > 1:
            for alias in node.names:  # `import torch, wandb`, of which one is not installed
                run_statement(ast.copy_location(ast.Import([alias]), node), space, failures, cell)
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                space[(alias.asname or alias.name).partition(".")[0]] = not_installed(node, alias.name)
            return
        if (wanted := missing(error) or unnamed(node, error)) is not None:
            raise KeyError(wanted) from error
        if wants_messages(error):
            raise TypeError("messages") from error
        if wants_object(error) and "messages" in sys.modules["stand_ins"].columns.values():  # type: ignore[attr-defined]
            raise TypeError("object") from error
        if (count := unknown_number(error)) and "number" in sys.modules["stand_ins"].columns.values():  # type: ignore[attr-defined]
            raise TypeError(f"number:{count}") from error
        if "JSON object must be str" in str(error) and "list" in str(error):
            raise TypeError("json") from error
        failures.append(f"cell {cell}, line {node.lineno}: {type(error).__name__}: {str(error)[:200]}")
        failed.append(failures[-1])
        forget(node, space)


def not_installed(node: ast.Import | ast.ImportFrom, name: str) -> object:
    """What an import that failed gives."""
    package = sys.modules["stand_ins"].missing_package  # type: ignore[attr-defined]
    return package(name) if isinstance(node, ast.Import) else getattr(package(node.module or ""), name)


def missing(error: BaseException) -> str | None:
    """The column that a statement missed."""
    found: BaseException | None = error
    while found is not None:
        text = str(found)
        if isinstance(found, KeyError) and found.args and isinstance(found.args[0], str):
            if re.fullmatch(r"[\w .\-/]{1,60}", found.args[0]):
                return found.args[0]
        if isinstance(found, KeyError) and (match := re.match(r"Index\(\['([^']{1,60})'", text)):
            return match[1]
        if match := re.match(r"'(?:DataFrame|Series)' object has no attribute '(\w+)'", text):
            return match[1]
        if re.search(
            r"not in the dataset|[Cc]olumn '.{0,200}' doesn't exist|not found in axis|are in the \[columns\]"
            r"|not in index",
            text,
        ):
            text = text.partition("urrent columns")[0]  # what follows are the columns that it has
            names = re.findall(r"'([^']{1,60})'", text) or re.findall(r"[Cc]olumn name (.{1,60}?) not in", text)
            wanted = [name for name in names if name not in sys.modules["stand_ins"].columns]  # type: ignore[attr-defined]
            if names:
                return (wanted or names)[0]
        found = found.__cause__ or found.__context__
    return None


def unnamed(node: ast.stmt, error: BaseException) -> str | None:
    """The first column that `frame.columns = [...]` names and that the rows lack."""
    if not isinstance(node, ast.Assign) or "Length mismatch: Expected axis has" not in str(error):
        return None
    names = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
    known = sys.modules["stand_ins"].columns  # type: ignore[attr-defined]
    return next((name for name in names if isinstance(name, str) and name not in known), None)


def wants_messages(error: BaseException) -> bool:
    return isinstance(error, TypeError) and "string indices must be integers" in str(error)


def wants_object(error: BaseException) -> bool:
    return "list indices must be integers or slices, not str" in str(error) or "only integers, slices" in str(error)


def unknown_number(error: BaseException) -> int:
    """The first number that a table has no key for, if it has one for 0."""
    found: BaseException | None = error
    while found is not None:
        if type(found) is KeyError and len(found.args) == 1 and isinstance(found.args[0], int):
            return found.args[0]
        found = found.__cause__ or found.__context__
    return 0


def forget(node: ast.stmt, space: Values) -> None:
    """Remove what a failed statement may have left half done, so that nothing is trained with it."""
    for part in ast.walk(node):
        name = None
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            name = part.id
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            if isinstance(part.func.value, ast.Name) and not _looks(part, node):
                name = part.func.value.id
        kept = (types.ModuleType, sys.modules["stand_ins"].Missing)  # type: ignore[attr-defined]
        if name in space and not isinstance(space[name], kept):
            del space[name]


LOOKS = (
    "decode batch_decode apply_chat_template generate head info print_trainable_parameters get_device_properties"
    " encode select push_to_hub save_pretrained save_pretrained_merged push_to_hub_merged save_pretrained_gguf"
    " push_to_hub_gguf evaluate"
).split()


def _looks(call: ast.Call, node: ast.stmt) -> bool:
    """Whether a call only looks at its object."""
    return call.func.attr in LOOKS  # type: ignore[attr-defined]


def find_columns(cells: list[str], stand_ins: Any, start: dict[str, str]) -> tuple[object, str]:
    """Run again and again, with one more column each time. Returns the trainer and the text field that only the
    trainer asked for, or ""."""
    source = "\n".join(cells)
    stand_ins.by_line = "json.load(" not in source
    stand_ins.columns.clear()
    stand_ins.columns.update(start)
    seen, tried = set(), [""]
    for _ in range(TRIES):
        try:
            trainer = execute(cells, stand_ins)
            state["rows"] = rows_of(trainer, stand_ins)
            if stand_ins.columns or not stand_ins.asked or not (optional := optional_columns(source)):
                return trainer, ""
            for name in optional:
                change(name, source, stand_ins)
            continue
        except Failed:
            if not adapt(cells, stand_ins, tried):
                raise
            continue
        except KeyError as error:
            name, by_trainer = str(error.args[0]), state.get("by_trainer")
            if by_trainer and not stand_ins.columns:
                return None, by_trainer
        except TypeError as error:
            name, wanted = "role", str(error)
            former = FORMER.get(wanted.partition(":")[0])
            if former is None:
                raise Failed(f"{type(error).__name__}: {error}") from None
            last = [column for column, kind in stand_ins.columns.items() if kind == former]
            if not last:
                raise Failed("its rows are not text or messages") from None
            stand_ins.columns[last[-1]] = f"object:{'|'.join(keys(source))}" if wanted == "object" else wanted
            if wanted != "messages":
                continue
        try:
            change(name, source, stand_ins)
        except Failed:
            if not adapt(cells, stand_ins, tried):
                raise
        chosen = json.dumps(stand_ins.columns, sort_keys=True)
        if chosen in seen:
            raise Failed(f"no column found for {name!r}")
        seen.add(chosen)
    raise Failed("its rows need more columns than can be found")


# What a column was taken for before it turned out to be another kind.
FORMER = {"messages": "text", "json": "messages", "object": "messages", "number": "number"}


def keys(source: str) -> list[str]:
    """Texts that the code looks up in rows and objects."""
    found = re.findall(r"\[\s*[\"']([\w .\-]{1,40})[\"']\s*\]", source)
    found = [name for name in dict.fromkeys(found) if name not in sys.modules["stand_ins"].columns]  # type: ignore[attr-defined]
    return found[:40] or ["text"]


# Columns by which rows are grouped.
GROUPS = frozenset(
    "intent category class sentiment type topic domain language lang source difficulty level task".split()
)


def adapt(cells: list[str], stand_ins: types.ModuleType, tried: list[str]) -> bool:
    """Give the rows what the code looks for in them, once in each way: groups, then words that its filters or its
    response template look for. Returns whether anything changed. `tried` holds what did not help."""
    columns, before = stand_ins.columns, dict(stand_ins.columns)
    if "groups" not in tried:
        tried.append("groups")
        few = {name: f"choice:{name} a|{name} b|{name} c" for name in columns if name.lower() in GROUPS}
        columns.update({name: kind for name, kind in few.items() if columns[name] == "text"})
    if columns == before and "words" not in tried and (words := words_looked_for(cells, stand_ins)):
        tried.append("words")
        columns.update({name: f"text:{'|'.join(words)}" for name, kind in columns.items() if kind == "text"})
    return columns != before


def words_looked_for(cells: list[str], stand_ins: types.ModuleType) -> list[str]:
    """Texts that functions of `filter`, or a template of responses, look for in the rows."""
    found = list(stand_ins.record.get("templates", []))
    for cell in cells:
        try:
            nodes = list(ast.walk(ast.parse(cell)))
        except SyntaxError:
            continue
        calls = [one for one in nodes if isinstance(one, ast.Call) and getattr(one.func, "attr", "") == "filter"]
        names = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
        functions = [one for one in nodes if isinstance(one, ast.FunctionDef) and one.name in names]
        for one in (part for outer in [*calls, *functions] for part in ast.walk(outer)):
            lists = [one] if isinstance(one, ast.List | ast.Tuple | ast.Set) else []
            compared = [one.left] if isinstance(one, ast.Compare) and isinstance(one.ops[0], ast.In | ast.NotIn) else []
            texts = compared + [item for each in lists for item in each.elts]
            found += [text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]
    return [word for word in dict.fromkeys(found) if word.strip() and "|" not in word and len(word) < 80][:6]


def rows_of(trainer: Any, stand_ins: types.ModuleType) -> list[object]:
    """The rows as the trainer's collator gives them. Raises Failed if no token of them is trained on."""
    found = []
    trainer._set_signature_columns_if_needed()
    for index in range(len(trainer.train_dataset)):
        row = trainer.train_dataset[index]
        batch = trainer.data_collator([{key: row[key] for key in row if key in trainer._signature_columns}])
        end = int(sum(batch["attention_mask"][0])) if trainer.args.pad_to_multiple_of else None
        found.append(stand_ins.row(list(batch["input_ids"][0])[:end], list(batch["labels"][0])[:end]))
    found = [row for row in found if row]
    if not found:
        raise Failed("the notebook trains on no token of the generated rows")
    return found


def optional_columns(source: str) -> list[str]:
    """Columns that the code reads only if rows have them: `row.get("name", default)`."""
    found = re.findall(r"\.get\(\s*[\"']([\w \-]{1,60})[\"']", source)
    return [name for name in dict.fromkeys(found) if not name.isupper() and name not in ("role", "content")]


def change(name: str, source: str, stand_ins: types.ModuleType) -> None:
    """Add a column, or change the keys of the messages."""
    columns = stand_ins.columns
    lists = [column for column, kind in columns.items() if kind in ("messages", "sharegpt")]
    if name in ("role", "content", "from", "value") and lists:
        kind = "messages" if name in ("role", "content") else "sharegpt"
        columns.update(dict.fromkeys(lists, kind))
    elif name in columns:
        raise Failed(f"column {name!r} is lost on the way")
    elif name.lower() in stand_ins.CONVERSATIONS:
        sharegpt = re.search(r"standardize_sharegpt|standardize_data_formats|[\"'](from|value)[\"']", source)
        columns[name] = "sharegpt" if sharegpt else "messages"
    else:
        columns[name] = labels(name, source) or ("number" if name.lower() in stand_ins.NUMBERS else "text")


def labels(name: str, source: str) -> str:
    """The kind of a column whose values the code compares with constants, or goes through; else ""."""
    constant, column = r"[\"']([\w \-]{1,30})[\"']", re.escape(name)
    found = re.findall(rf"[.\"']{column}[\"'\]]*\s*==\s*{constant}", source)
    for listed in re.findall(rf"\bfor\s+{column}\s+in\s+\[([^\]\n]{{0,1000}})\]", source):
        found += re.findall(constant, listed)
    return "choice:" + "|".join(dict.fromkeys(found)) if len(set(found)) > 1 else ""


def result(trainer: Any, stand_ins: types.ModuleType, unsloth: bool) -> Values:
    """What the trainer would train with."""
    now = stand_ins.settings(trainer.args), stand_ins.arguments(trainer.args)
    chosen, arguments = (
        {key: value if value != after[key] else before[key] for key, value in values.items()}
        for values, after, before in zip(now, trainer._after, trainer._before, strict=True)
    )
    more = {"max_length": trainer._max_length, "packing": trainer._packing}
    return {
        "columns": dict(stand_ins.columns),
        "settings": chosen | more,
        "model": stand_ins.model_settings(trainer.model, trainer.processing_class, unsloth),
        "lora": stand_ins.record.get("lora"),
        "given": stand_ins.given(arguments, trainer.processing_class),
        "rows": state["rows"],
        "eos": getattr(trainer.processing_class, "eos_token_id", None),
        "failures": list(dict.fromkeys(failed)),
        "empty": False,
    }


def variants(field: str) -> list[dict[str, str]]:
    """The rows that TRL reads, if the notebook does not look at their columns."""
    return [{field: "text"}, {"messages": "messages"}, {"prompt": "text", "completion": "text"}]


def answer(job: Values, stand_ins: types.ModuleType) -> list[Values]:
    """Run the notebook of a job. Returns one run for each set of columns."""
    sys.meta_path.insert(0, stand_ins.Blocker("finetune", "patches"))
    cells, unsloth = job["cells"], job["unsloth"]
    stand_ins.prepare(unsloth, template=job["template"])
    stand_ins.replace_configs(unsloth, RENAMED)
    replace_trainer(unsloth, stand_ins)
    trainer, field = find_columns(cells, stand_ins, {})
    found = []
    for start in [dict(stand_ins.columns)] if trainer is not None else variants(field):
        if trainer is None or found:
            try:
                trainer, _ = find_columns(cells, stand_ins, dict(start))
            except Failed:
                if not found:
                    raise
                continue  # the notebook trains on the first of these guesses, and on no token of this one
        found.append(result(trainer, stand_ins, unsloth))
        trainer = None
    more = [with_empty_values(cells, stand_ins, run["columns"], unsloth) for run in found]
    return found + [run for run in more if run is not None]


def with_empty_values(cells: list[str], stand_ins: Any, start: dict[str, str], unsloth: bool) -> Values | None:
    """A run on rows of which some values are empty, as answers may be; None if the notebook fails on them."""
    before = len(failed)
    stand_ins.empty = True
    try:
        trainer, _ = find_columns(cells, stand_ins, dict(start))
        run = result(trainer, stand_ins, unsloth) | {"empty": True}
        return run if len(failed) == before and run["columns"] == start else None
    except Exception:
        return None
    finally:
        stand_ins.empty = False
        del failed[before:]
