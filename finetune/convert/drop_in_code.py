"""Rewrite the notebook's own statements for the drop-in form: arguments, devices, pushes, saves and written files."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from finetune.config.sft_fields import sft_fields
from finetune.convert.names import Program, effects, free_names, target_names, written_path
from finetune.convert.plan import EXPORTS, MODEL_FLAGS
from finetune.convert.read import Refusal, Statement

CONFIGS = ("SFTConfig", "TrainingArguments")
ORDINARY_SAVES = ("save_pretrained", "save_model", "save_state")
ON_EVERY_RANK = ("save_model", "save_state", "evaluate")  # methods of the trainer with collectives
MAIN_RANK = "PartialState().is_main_process"
LOCAL_MAIN_RANK = "PartialState().is_local_main_process"
WAIT = "PartialState().wait_for_everyone()"

_RENAMED = {
    "tokenizer": "processing_class",
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
# Arguments of SFTTrainer in older TRL that are fields of SFTConfig now.
_MOVED = frozenset(
    "dataset_text_field max_seq_length max_length packing eval_packing dataset_num_proc dataset_kwargs"
    " neftune_noise_alpha model_init_kwargs".split()
)
_TRAINER = frozenset(
    "model args data_collator train_dataset eval_dataset processing_class compute_loss_func callbacks optimizers"
    " optimizer_cls_and_kwargs quantization_config peft_config formatting_func".split()
)
_HUB = "nothing is published while training; publish the finished folder with `hf upload`"
_ORDER = "`seed` alone sets the order of the rows, and rows of similar length are grouped anyway"
_ONE_GPU = "each GPU holds the whole model"
_NO_EFFECT = "it has no effect on the result"
_METRICS = "evaluation reports loss, token accuracy and entropy, and builds no logits"
_LEFT_OUT = {
    **dict.fromkeys("compute_metrics preprocess_logits_for_metrics include_inputs_for_metrics".split(), _METRICS),
    **dict.fromkeys(
        "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_always_push push_to_hub_model_id"
        " push_to_hub_organization push_to_hub_token".split(),
        _HUB,
    ),
    **dict.fromkeys("group_by_length train_sampling_strategy length_column_name data_seed".split(), _ORDER),
    **dict.fromkeys("fsdp fsdp_config fsdp_min_num_params deepspeed parallelism_config sharded_ddp".split(), _ONE_GPU),
    **dict.fromkeys(
        "overwrite_output_dir logging_dir save_safetensors use_mps_device jit_mode_eval use_ipex half_precision_backend"
        " fp16_backend fp16_opt_level past_index ray_scope torchdynamo include_tokens_per_second dispatch_batches"
        " split_batches dataset_batch_size num_of_sequences chars_per_token infinite xpu_backend tpu_num_cores"
        " tpu_metrics_debug mp_parameters report_from_all_ranks disable_tqdm".split(),
        _NO_EFFECT,
    ),
    "use_liger_kernel": "Liger would replace the layers whose loss the trainer computes",
    "dataloader_drop_last": "an epoch trains on every row once",
    "auto_find_batch_size": "the batch would depend on the GPU; per_device_train_batch_size sets it",
    "average_tokens_across_devices": "the loss is always the mean over the whole global batch",
    "local_rank": "the launcher sets it",
}
_CHANGES_LOSS = ("label_smoothing_factor", "compute_loss_func", "loss_type")

# What a notebook gets if it leaves these out, where SFTConfig of TRL 1.15 has another default: transformers'
# TrainingArguments (5.17), and SFTConfig as Unsloth patches it (models/rl.py of unsloth 2026.10).
_TRANSFORMERS_DEFAULTS = {"learning_rate": 5e-5, "logging_steps": 500, "gradient_checkpointing": False, "bf16": False}
_UNSLOTH_DEFAULTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-5,
    "weight_decay": 0.001,
    "warmup_steps": 0.1,
    "optim": "adamw_8bit",
    "logging_steps": 1,
    "seed": 3407,
}
# For the verification: arguments that may differ from the notebook's, and values that may be new.
CHANGED_ARGUMENTS = frozenset({*_LEFT_OUT, *_CHANGES_LOSS, "report_to", "warmup_ratio"})
WRITTEN_DEFAULTS = {
    name: tuple(defaults[name] for defaults in (_TRANSFORMERS_DEFAULTS, _UNSLOTH_DEFAULTS) if name in defaults)
    for name in _TRANSFORMERS_DEFAULTS | _UNSLOTH_DEFAULTS
}
_UNSLOTH_OUTPUT = "unsloth_training_checkpoints"
_UNSLOTH_LENGTH = 2048  # default of from_pretrained(max_seq_length=...)


@dataclass(kw_only=True)
class Rewritten:
    """What replaces a statement (nothing if it is left out), and what changed in it."""

    nodes: list[ast.stmt]
    reasons: list[str]
    notes: list[str] = field(default_factory=list)


# --- arguments of the trainer and its configuration -------------------------------------------------------------------


class Arguments:
    """New arguments for each SFTTrainer, SFTConfig and TrainingArguments of a notebook.

    Raises:
        Refusal: R4, for arguments that are unknown, only known at run time, or change the loss.
    """

    def __init__(self, program: Program, *, unsloth: bool) -> None:
        self.program, self.unsloth = program, unsloth
        self.reasons: dict[int, list[str]] = {}  # place -> what changed
        self.seed: int | None = None
        self.length = self._loaded_length()
        trainers = [(place, call) for place, call in self._calls("SFTTrainer")]
        if unsloth:
            for place, call in trainers:
                self._default_config(place, call)
        configs = [(place, call) for place, call in self._calls(*CONFIGS)]
        for place, call in [*configs, *trainers]:
            call.keywords = self._spread(place, call)
        cut = any(item.arg in ("max_seq_length", "max_length") for _, call in trainers for item in call.keywords)
        for place, call in trainers:
            self._trainer(place, call, configs)
        for place, call in configs:
            self._config(place, call, needs_length=unsloth and not cut)
        if unsloth and not configs and not cut:
            for place, call in trainers:
                call.keywords.append(self._length_keyword(place, "max_seq_length"))

    def _default_config(self, place: int, call: ast.Call) -> None:
        """Unsloth's own configuration for a trainer without `args`, whose defaults are then written out."""
        if len(call.args) > 1 or any(item.arg in ("args", None) for item in call.keywords):
            return
        folder = ast.keyword(arg="output_dir", value=ast.Constant(_UNSLOTH_OUTPUT))
        config = ast.Call(func=ast.Name("SFTConfig", ast.Load()), args=[], keywords=[folder])
        call.keywords.append(ast.keyword(arg="args", value=config))
        self._say(place, "the trainer has no `args`; Unsloth's defaults are written out")

    def _calls(self, *names: str) -> list[tuple[int, ast.Call]]:
        return [
            (place, node)
            for place, statement in enumerate(self.program.statements)
            for node in ast.walk(statement.node)
            if isinstance(node, ast.Call) and self.program.dotted(node.func).rsplit(".", 1)[-1] in names
        ]

    def _loaded_length(self) -> ast.expr:
        for _, call in self._calls("from_pretrained"):
            for item in call.keywords:
                if item.arg == "max_seq_length":
                    return item.value
        return ast.Constant(_UNSLOTH_LENGTH)

    def _say(self, place: int, text: str) -> None:
        self.reasons.setdefault(place, []).append(text)

    def _refuse(self, place: int, reason: str) -> Refusal:
        return Refusal("R4", reason, self.program.statements[place].cell)

    def _spread(self, place: int, call: ast.Call) -> list[ast.keyword]:
        """The keywords, with `**settings` written out if settings is a dict literal that nothing changes."""
        found: list[ast.keyword] = []
        for item in call.keywords:
            if item.arg is not None:
                found.append(item)
                continue
            found += self._of_dict(place, item.value)
            self._say(place, f"`**{ast.unparse(item.value)}` is written out")
        return found

    def _of_dict(self, place: int, value: ast.expr) -> list[ast.keyword]:
        if isinstance(value, ast.Name):
            bound = [
                statement.node.value
                for statement in self.program.statements
                if isinstance(statement.node, ast.Assign) and value.id in target_names(statement.node.targets[0])
            ]
            changed = any(value.id in e.changes for e in self.program.effects)
            if len(bound) == 1 and not changed:
                return self._of_dict(place, bound[0])
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and not value.args:
            return value.keywords
        if isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
            pairs = zip(value.keys, value.values, strict=True)
            return [ast.keyword(arg=str(key.value), value=one) for key, one in pairs if isinstance(key, ast.Constant)]
        raise self._refuse(place, f"the arguments `**{ast.unparse(value)[:60]}` are not known; write them as keywords")

    def _trainer(self, place: int, call: ast.Call, configs: Sequence[tuple[int, ast.Call]]) -> None:
        keywords, moved = [], []
        for item in call.keywords:
            name = str(item.arg)
            if name in _MOVED:
                moved.append(item)
            elif self._is_left_out(place, name, item.value):
                continue
            else:
                item.arg = self._renamed(place, name)
                if item.arg not in _TRAINER:
                    raise self._refuse(place, f"SFTTrainer has no argument `{name}` in TRL 1.15; remove it")
                keywords.append(item)
        call.keywords = keywords
        config = next((one for at, one in configs if at == place and one in ast.walk(call)), None)
        if config is None and len(configs) == 1 and self._bound_before(moved, configs[0][0], place):
            config = configs[0][1]
        if config is None:
            call.keywords += moved  # the trainer still takes them
            return
        given = {self._new_name(str(item.arg)) for item in config.keywords}
        for item in moved:
            if self._new_name(str(item.arg)) not in given:
                config.keywords.append(item)
                self._say(place, f"`{item.arg}` moved to SFTConfig")

    def _bound_before(self, moved: Sequence[ast.keyword], config: int, trainer: int) -> bool:
        """Whether the values mean the same at the configuration as at the trainer."""
        names = {name for item in moved for name in free_names(item.value)}
        between = self.program.effects[config:trainer]
        return config < trainer and not any(names & (e.binds | e.may_bind | e.changes) for e in between)

    def _config(self, place: int, call: ast.Call, *, needs_length: bool) -> None:
        of_transformers = self.program.dotted(call.func).endswith("TrainingArguments")
        keywords = []
        for item in call.keywords:
            name = str(item.arg)
            if self._is_left_out(place, name, item.value):
                continue
            if name == "warmup_ratio" and any(one.arg == "warmup_steps" for one in call.keywords):
                continue
            item.arg = self._renamed(place, name)
            if item.arg not in sft_fields() and item.arg != "output_dir":
                raise self._refuse(place, f"SFTConfig has no argument `{name}` in TRL 1.15; remove it")
            if item.arg == "report_to" and self._reports_elsewhere(item.value):
                item.value = ast.Constant("none")
                self._say(place, "metrics go to TensorBoard, without an account")
            keywords.append(item)
        call.keywords = keywords
        given = {item.arg for item in keywords}
        defaults = _TRANSFORMERS_DEFAULTS if of_transformers else _UNSLOTH_DEFAULTS if self.unsloth else {}
        for name, value in defaults.items():
            if name not in given:
                call.keywords.append(ast.keyword(arg=name, value=ast.Constant(value)))
                self._say(place, f"the notebook's default {name}={value!r} is written out")
        if needs_length and not given & {"max_length"}:
            call.keywords.append(self._length_keyword(place, "max_length"))
        if of_transformers:
            self._say(place, "TrainingArguments became SFTConfig")
        for item in call.keywords:
            if item.arg == "seed" and isinstance(item.value, ast.Constant) and isinstance(item.value.value, int):
                self.seed = item.value.value

    def _length_keyword(self, place: int, name: str) -> ast.keyword:
        self._say(place, "Unsloth takes the length from the loader; it is written out")
        return ast.keyword(arg=name, value=copy.deepcopy(self.length))

    def _is_left_out(self, place: int, name: str, value: ast.expr) -> bool:
        empty = isinstance(value, ast.Constant) and value.value in (None, False, 0, "", "nll")
        if name in _CHANGES_LOSS and not empty:
            raise self._refuse(place, f"`{name}` changes the loss, which must be exact on several GPUs; remove it")
        if name not in _LEFT_OUT and name not in _CHANGES_LOSS:
            return False
        if not empty and name in _LEFT_OUT:
            self._say(place, f"`{name}` is left out: {_LEFT_OUT[name]}")
        return True

    def _new_name(self, name: str) -> str:
        return _RENAMED.get(name, name)

    def _renamed(self, place: int, name: str) -> str:
        new = self._new_name(name)
        if new != name:
            self._say(place, f"`{name}` is `{new}` now")
        return new

    @staticmethod
    def _reports_elsewhere(value: ast.expr) -> bool:
        names = {node.value for node in ast.walk(value) if isinstance(node, ast.Constant)}
        return not names <= {"none", "tensorboard", None}


# --- statements -------------------------------------------------------------------------------------------------------

_SECRETS = re.compile(r"(google\.colab\.userdata\.get|kaggle_secrets\..*get_secret|.*\.get_secret)$")
_PROVIDED = frozenset("SFTTrainer SFTConfig DataCollatorForCompletionOnlyLM setup_chat_format".split())
_RUNS_TEXT = ("globals", "exec", "eval", "compile", "__import__")


class Rewriter(ast.NodeTransformer):
    """Rewrites one statement after another. `written` are names of the notebook's functions that write files."""

    def __init__(self, program: Program, refuse: Callable[[str], Refusal], *, bound: set[str]) -> None:
        self.program, self.refuse, self.bound = program, refuse, bound
        self.reasons: list[str] = []
        self.notes: list[str] = []

    def statement(self, node: ast.stmt, *, main_rank: bool = False) -> Rewritten:
        """The statement for N ranks. `main_rank`: only the main rank runs it, so saves need no guard."""
        self.reasons, self.notes = [], []
        nodes = self._block([copy.deepcopy(node)], main_rank)
        return Rewritten(nodes=nodes, reasons=list(dict.fromkeys(self.reasons)), notes=self.notes)

    def _block(self, nodes: Sequence[ast.stmt], main_rank: bool) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for node in nodes:
            if self._is_left_out(node):
                continue
            if not main_rank and saves(node) and not runs_together(node) and isinstance(node, ast.Expr):
                found.append(guarded(MAIN_RANK, [self._inside(node, True)]))
                self.reasons.append("the main rank saves")
            else:
                found.append(self._inside(node, main_rank))
        return found

    def _inside(self, node: ast.stmt, main_rank: bool) -> ast.stmt:
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                new = self._block(body, main_rank)
                setattr(node, name, new or ([ast.Pass()] if name == "body" else []))
        for handler in getattr(node, "handlers", []) + getattr(node, "cases", []):
            handler.body = self._block(handler.body, main_rank) or [ast.Pass()]
        return ast.fix_missing_locations(self._expressions(node))

    def _expressions(self, node: ast.stmt) -> ast.stmt:
        """Rewrite the expressions of a statement, not those of the statements inside, which are done already."""
        if isinstance(node, ast.ImportFrom | ast.Global):
            return self.visit(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.AST) and not isinstance(value, ast.stmt):
                setattr(node, name, self.visit(value))
            elif isinstance(value, list):
                new = [
                    one if isinstance(one, ast.stmt | ast.excepthandler | ast.match_case) else self.visit(one)
                    for one in value
                    if isinstance(one, ast.AST)
                ]
                if new:
                    setattr(node, name, new)
        return node

    def _is_left_out(self, node: ast.stmt) -> bool:
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if call is not None and is_push(self.program, call):
            self.notes.append(f"`{ast.unparse(node)[:60]}` is left out: publish the finished folder with `hf upload`")
            self.reasons.append("nothing is published by a script")
            return True
        flag = isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") in MODEL_FLAGS
        device = call is not None and self.program.dotted(call.func).endswith("cuda.set_device")
        if flag or device:
            self.reasons.append("each rank has its own device")
        return flag or device

    # --- expressions --------------------------------------------------------------------------------------------------

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if (node.module or "").split(".")[0] == "trl":
            node.names = [alias for alias in node.names if alias.name not in _PROVIDED]
        return node if node.names else ast.Pass()

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        if set(node.names) <= self.bound:
            self.reasons.append("the code is in main(), so global names are nonlocal")
            return ast.Nonlocal(names=node.names)
        raise self.refuse(f"`{ast.unparse(node)}` names a variable that no cell assigns; assign it in a cell first")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = self.program.dotted(node.func)
        last = name.rsplit(".", 1)[-1] or getattr(node.func, "attr", "")
        if name in _RUNS_TEXT:
            raise self.refuse(f"`{ast.unparse(node)[:60]}` uses names that only exist at run time; write them directly")
        if (variable := _secret(self.program, node)) is not None:
            self.reasons.append("secrets come from environment variables")
            return variable
        self.generic_visit(node)
        if last in ("SFTTrainer", *CONFIGS):
            node.func = ast.Name("SFTTrainer" if last == "SFTTrainer" else "SFTConfig", ast.Load())
        elif last in _PROVIDED and name.split(".")[0] == "trl":
            node.func = ast.Name(last, ast.Load())
        elif last == "from_pretrained":
            self._loader(node, name)
        elif last in ("to", "cuda") and self._moves_a_model(node):
            assert isinstance(node.func, ast.Attribute)
            return node.func.value
        elif last == "cuda" and node.args:
            node.args = []
        node.keywords = [item for item in node.keywords if item.arg != "push_to_hub" or last == "SFTConfig"]
        return node

    def _loader(self, node: ast.Call, name: str) -> None:
        """Load onto this rank's device. Unsloth finds it by itself."""
        given = [item for item in node.keywords if item.arg in ("device_map", "max_memory")]
        if not given:
            return
        node.keywords = [item for item in node.keywords if item not in given]
        self.reasons.append("each rank has its own device")
        if any(item.arg == "device_map" for item in given) and not re.search(r"\bFast\w*Model\b|Tokenizer", name):
            device = ast.parse('{"": PartialState().device}', mode="eval").body
            node.keywords.append(ast.keyword(arg="device_map", value=device))

    def _moves_a_model(self, node: ast.Call) -> bool:
        """`AutoModel.from_pretrained(...).to("cuda")`"""
        inside = node.func.value if isinstance(node.func, ast.Attribute) else None
        last = self.program.dotted(inside.func).rsplit(".", 1)[-1] if isinstance(inside, ast.Call) else ""
        kept = any(re.search(r"dtype|float|bf?loat16|half", ast.unparse(one)) for one in [*node.args, *node.keywords])
        if last in ("from_pretrained", "get_peft_model") and not kept:
            self.reasons.append("each rank has its own device")
            return True
        return False

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and re.fullmatch(r"cuda:\d+", node.value):
            self.reasons.append("each rank has its own device")
            return ast.copy_location(ast.Constant("cuda"), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self.program.dotted(node) in ("trl.SFTTrainer", "trl.SFTConfig"):
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        return node


def _secret(program: Program, node: ast.Call) -> ast.expr | None:
    """The environment variable that replaces the secret of a hosted service."""
    if not (_SECRETS.match(program.dotted(node.func) or ast.unparse(node.func)) and node.args):
        return None
    return ast.parse(f"os.environ.get({ast.unparse(node.args[0])})", mode="eval").body


class _Variables(ast.NodeTransformer):
    def __init__(self, program: Program) -> None:
        self.program = program

    def visit_Call(self, node: ast.Call) -> ast.AST:
        variable = _secret(self.program, node)
        return self.generic_visit(node) if variable is None else variable


def without_secret_services(statements: Sequence[Statement]) -> list[Statement]:
    """The statements with environment variables for the secrets of hosted services, as the script has them."""
    program = Program(statements)
    found = [Statement(id=-1, cell=0, line=1, node=ast.parse("import os").body[0], source="import os")]
    for statement in statements:
        new = ast.fix_missing_locations(_Variables(program).visit(copy.deepcopy(statement.node)))
        same = ast.dump(new) == ast.dump(statement.node)
        found.append(statement if same else replace(statement, node=new, source=ast.unparse(new)))
    return found


def calls(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def is_push(program: Program, call: ast.Call) -> bool:
    """Whether a call publishes something."""
    name = method(call) or program.dotted(call.func).rsplit(".", 1)[-1]
    return name.startswith(("push_to_hub", "upload_f", "create_repo", "upload_large")) or name == "upload_model"


def saves(node: ast.AST) -> bool:
    """Whether it saves or exports a model, a tokenizer or a trainer's state."""
    return any(
        method(call) in {*EXPORTS, *ORDINARY_SAVES}
        and not method(call).startswith("push_to_hub")
        or ast.unparse(call.func) == "torch.save"
        for call in calls(node)
    )


def runs_together(node: ast.AST) -> bool:
    """Whether it calls a method of the trainer's that every rank must call."""
    return any(method(call) in ON_EVERY_RANK for call in calls(node))


def writes_files(program: Program, node: ast.stmt) -> bool:
    """Whether running the statement writes a file; functions of the notebook that it calls count."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    if any(written_path(call) is not None or _dumps(call) for call in calls(node)):
        return True
    return any(_function_writes(program, call.func.id) for call in calls(node) if isinstance(call.func, ast.Name))


def _dumps(call: ast.Call) -> bool:
    return method(call) in ("makedirs", "mkdir", "rmtree", "copyfile", "unzip", "extractall", "urlretrieve")


def _function_writes(program: Program, name: str) -> bool:
    definition = program.definition(name)
    return definition is not None and any(written_path(call) is not None for call in calls(definition))


def guarded(condition: str, body: list[ast.stmt]) -> ast.stmt:
    node = ast.If(test=ast.parse(condition, mode="eval").body, body=body, orelse=[])
    return ast.fix_missing_locations(node)


def own_targets(node: ast.stmt) -> set[str]:
    """Names that a loop or a context manager binds for its own use."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.For | ast.AsyncFor):
            found |= set(target_names(inner.target))
        elif isinstance(inner, ast.withitem) and inner.optional_vars is not None:
            found |= set(target_names(inner.optional_vars))
    return found


def reads(node: ast.stmt) -> set[str]:
    """Names that a statement needs from outside."""
    e = effects(node)
    return (e.all_reads | e.changes) - own_targets(node)


def binds(node: ast.stmt) -> set[str]:
    e = effects(node)
    return e.binds | e.may_bind
