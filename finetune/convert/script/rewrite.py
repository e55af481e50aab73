"""Rewrite the notebook's own statements for any number of ranks: devices, secrets, pushes, saves and written files."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from finetune.convert.analysis.changes import moves
from finetune.convert.analysis.classify import is_model_name
from finetune.convert.analysis.environment import MODEL_FLAGS, is_token, of_launcher
from finetune.convert.analysis.names import (
    DEFINITIONS,
    Program,
    calls,
    effects,
    lone_call,
    method,
    root,
    target_names,
    written_path,
)
from finetune.convert.knowledge import matches, named
from finetune.convert.notebook.read import Refusal, Statement
from finetune.convert.script.arguments import CONFIGS
from finetune.convert.source import expression

MAIN_RANK = "PartialState().is_main_process"
LOCAL_MAIN_RANK = "PartialState().is_local_main_process"
WAIT = "PartialState().wait_for_everyone()"
FROM_FINETUNE = "the script imports it from finetune, or has its own"


@dataclass(kw_only=True)
class Rewritten:
    """What replaces a statement (nothing if it is left out), and what changed in it."""

    nodes: list[ast.stmt]
    reasons: list[str]
    notes: list[str] = field(default_factory=list)


# --- statements -------------------------------------------------------------------------------------------------------

# What the script imports from finetune: the trainer, what configures it, and what TRL has removed.
PROVIDED = frozenset("SFTTrainer SFTConfig TrainingArguments DataCollatorForCompletionOnlyLM setup_chat_format".split())


class Rewriter(ast.NodeTransformer):
    """Rewrites one statement after another. `bound` are the names that the statements of main() bind."""

    def __init__(self, program: Program, *, bound: set[str]) -> None:
        self.program, self.bound = program, bound
        self.secrets: set[str] = set()
        self.reasons: list[str] = []
        self.notes: list[str] = []
        given = [item for one in program.statements for call in calls(one.node) for item in call.keywords]
        reported = [one for item in given if item.arg == "report_to" for one in ast.walk(item.value)]
        self.reports = any(getattr(one, "value", None) in _TRACKERS for one in reported)
        self.trainers = {
            name
            for one in program.statements
            if isinstance(one.node, ast.Assign) and isinstance(one.node.value, ast.Call)
            if program.dotted(one.node.value.func).endswith("SFTTrainer")
            for name in target_names(one.node.targets[0])
        }
        self.trains = False  # whether the statement sets up the training, so that every rank runs all of it once
        self.calls_back = False  # whether it is a class of callbacks, whose methods every rank runs

    def statement(self, statement: Statement, *, main_rank: bool = False) -> Rewritten:
        """The statement for N ranks. `main_rank`: only the main rank runs it, so saves need no guard."""
        self.reasons, self.notes, self.cell, node = [], [], statement.cell, statement.node
        self.trains = any(self.program.dotted(call.func).endswith("SFTTrainer") for call in calls(node))
        self.imports = isinstance(node, ast.ImportFrom)
        self.calls_back = isinstance(node, ast.ClassDef) and "Callback" in " ".join(map(ast.unparse, node.bases))
        node = copy.deepcopy(node)
        starts = any(isinstance(one, ast.withitem) and self._tracks(one) for one in ast.walk(node))
        self.tracking = starts or self.calls_back and self.reports  # so that the main rank tracks
        self.accounts = self._of_accounts(node) if self.tracking or isinstance(node, DEFINITIONS) else []
        nodes = self._block([node], main_rank)
        return Rewritten(nodes=nodes, reasons=list(dict.fromkeys(self.reasons)), notes=self.notes)

    def _refuse(self, reason: str) -> Refusal:
        return Refusal("R4", reason, self.cell)

    def _block(self, nodes: Sequence[ast.stmt], main_rank: bool) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        tries = self._tries(nodes)
        for node in nodes:
            if node in tries:
                self.reasons.append("the trained model is not tried")
                continue
            if self._is_left_out(node):
                continue
            if isinstance(node, ast.ImportFrom):
                found += self._imported(node)
            elif not main_rank and node in self.accounts:
                found.append(guarded(MAIN_RANK, [self._inside(node, True)]))
                self.reasons.append("the main rank tracks")
            elif not main_rank and saves(node) and not runs_together(node) and isinstance(node, ast.Expr):
                found.append(guarded(MAIN_RANK, [self._inside(node, True)]))
                self.reasons.append("the main rank saves")
            elif not main_rank and self.calls_back and _only_writes(node):
                found.append(guarded(MAIN_RANK, [self._inside(node, True)]))
                self.reasons.append("the main rank writes")
            elif not main_rank and self.trains and _only_writes(node):
                wait = ast.parse(WAIT).body[0]
                found += [guarded(LOCAL_MAIN_RANK, [self._inside(node, True)]), wait]
                self.reasons.append("files are written once per machine")
            else:
                found.append(self._inside(node, main_rank))
        return found

    def _tries(self, nodes: Sequence[ast.stmt]) -> list[ast.stmt]:
        """The statements of a body that try the model which it has trained, with what only these make; none if
        others need it."""
        trains = (call for node in nodes for call in calls(node) if method(call) == "train")
        first = next((call for call in trains if not is_model_name(call.func.value)), None)  # type: ignore[attr-defined]
        if first is None or len(nodes) == 1:
            return []
        place = next(n for n, node in enumerate(nodes) if first in calls(node))
        found: list[ast.stmt] = []
        made: set[str] = set()
        for node in nodes[place + 1 :]:
            each = [node, *self.program.called(node)]
            if saves(node) or isinstance(node, DEFINITIONS) or any(map(saves, each)):
                if reads(node) & made:
                    return []
            elif any(map(infers, each)) or reads(node) & made:
                found.append(node)
                made |= binds(node)
        return [] if any(isinstance(inner, ast.Return) for node in found for inner in ast.walk(node)) else found

    def _imported(self, node: ast.ImportFrom) -> list[ast.stmt]:
        """The import, and in its place what finetune has: under another name or inside a statement. All else of
        finetune's is imported at the top."""
        has = PROVIDED if (node.module or "").split(".")[0] in ("trl", "transformers") else frozenset[str]()
        ours = [one for one in node.names if one.name in has and (one.asname or not self.imports)]
        node.names = [one for one in node.names if one.name not in has]
        for alias in node.names if node.module == "peft" else ():
            if alias.name == _INT8:
                self.reasons.append(f"{_INT8} is {_KBIT} today")
                alias.name, alias.asname = _KBIT, alias.asname or _INT8
        self.reasons += [FROM_FINETUNE] if ours else []
        return [one for one in (ast.ImportFrom("finetune", ours, 0), node) if one.names]

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
        if isinstance(node, ast.Assign) and _key(node.targets[0]) == "device_map" and not _on_cpu(node.value):
            node.value = self._this_device()
            return node
        if isinstance(node, ast.Global):
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
        call = lone_call(node)
        name = "" if call is None else self.program.dotted(call.func)
        if call is not None and is_push(self.program, call):
            self.notes.append(f"`{ast.unparse(node)[:60]}` is left out: {to_publish(node)}")
            self.reasons.append("nothing is published by a script")
            return True
        if node in self.accounts and (name.endswith("login") or not self.tracking):
            self.notes.append(f"`{ast.unparse(node)[:60]}` is left out: account or service")
            self.reasons.append("account or service")
            return True
        if call is not None and only_installs(node):
            self.reasons.append("packages are installed before the script starts")
            return True
        if name.startswith("IPython.") or name == "display" and name not in self.bound:  # only notebooks have these
            self.reasons.append("display")
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "google.colab" and _names(node) == ["userdata"]:
            return True  # its calls become environment variables
        if self._of_secrets(node):
            self.reasons.append("secrets come from environment variables")
            return True
        if isinstance(node, ast.Assign) and "CUDA_VISIBLE_DEVICES" in ast.unparse(node.targets[0]):
            self.reasons.append("each rank has its own device")
            return True
        if of_launcher(node) or name == "torch.distributed.destroy_process_group":
            self.reasons.append("the launcher starts and connects the ranks")
            return True
        if isinstance(node, ast.Assign) and (variable := _secret(self.program, node.value)) is not None:
            if ast.unparse(node.targets[0]) == ast.unparse(variable).replace(".get(", "[").replace(")", "]"):
                self.reasons.append("secrets come from environment variables")
                return True
        flag = isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") in MODEL_FLAGS
        if flag or name.endswith("cuda.set_device"):
            self.reasons.append("each rank has its own device")
            return True
        return False

    def _of_accounts(self, node: ast.stmt) -> Sequence[ast.stmt]:
        """The statements inside a function or class that only log in or track, on every rank: `run = wandb.init()`,
        `run.log(values)`; none if others read what these make, or `wandb.config`."""
        inside = [one for one in ast.walk(node) if isinstance(one, ast.Expr | ast.Assign)]
        assigned = [one for one in inside if isinstance(one, ast.Assign) and self._tracks(one)]
        made = {ast.unparse(target) for one in assigned for target in one.targets}
        found = [one for one in inside if self._tracks(one) or _receiver(one) in made]
        theirs = {inner for one in found for inner in ast.walk(one)}
        needed = {ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.expr) and one not in theirs}
        needed |= {name for one in ast.walk(node) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
        return [] if needed & made or any("wandb.config" in one.source for one in self.program.statements) else found

    def _tracks(self, node: ast.Expr | ast.Assign | ast.withitem) -> bool:
        value = node.context_expr if isinstance(node, ast.withitem) else node.value
        name = self.program.dotted(value.func) if isinstance(value, ast.Call) else ""
        return matches("account", name) and (name.startswith(_TRACKERS) or name.endswith("login"))

    def visit_withitem(self, node: ast.withitem) -> ast.withitem:
        """A tracker that a `with` starts, on the main rank: the others have a run of W&B's that does nothing."""
        tracks, call = self._tracks(node), node.context_expr
        self.generic_visit(node)
        if not tracks or not isinstance(call, ast.Call):
            return node
        self.reasons.append("the main rank tracks")
        self.notes.append(f"`{ast.unparse(call)[:60]}` starts on the main rank: log in before, or leave it out")
        if self.program.dotted(call.func) == "wandb.init":
            given = next((item.value for item in call.keywords if item.arg == "mode"), ast.Constant(None))
            call.keywords = [item for item in call.keywords if item.arg != "mode"]
            mode = expression(f"GIVEN if {MAIN_RANK} else 'disabled'", GIVEN=given)
            call.keywords.append(ast.keyword("mode", mode))
        elif node.optional_vars is None:
            node.context_expr = expression(f"CALL if {MAIN_RANK} else nullcontext()", CALL=call)
        else:
            raise self._refuse(f"`with {ast.unparse(node)[:60]}` starts a tracker on every rank; leave out the `as`")
        return node

    def _of_secrets(self, node: ast.stmt) -> bool:
        """A client of Kaggle's secrets, or a secret copied from a variable into the environment, where it is anyway."""
        if not isinstance(node, ast.Assign):
            return False
        name = ast.unparse(node.targets[0])
        if isinstance(node.value, ast.Call) and self.program.dotted(node.value.func).endswith("UserSecretsClient"):
            return True
        if _secret(self.program, node.value) is not None:
            self.secrets.add(name)
        copied = isinstance(node.value, ast.Name) and node.value.id in self.secrets
        return copied and name.startswith("os.environ[")

    # --- expressions --------------------------------------------------------------------------------------------------

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        if set(node.names) <= self.bound:
            self.reasons.append("the code is in main(), so global names are nonlocal")
            return ast.Nonlocal(names=node.names)
        raise self._refuse(f"`{ast.unparse(node)}` names a variable that no cell assigns; assign it in a cell first")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = self.program.dotted(node.func)
        last = name.rsplit(".", 1)[-1] or getattr(node.func, "attr", "")
        of_data = name == "eval" and len(node.args) == 1 and isinstance(node.args[0], ast.Name | ast.Subscript)
        if name in named("runs text") and not of_data:
            raise self._refuse(
                f"`{ast.unparse(node)[:60]}` uses names that only exist at run time; write them directly"
            )
        if (variable := _secret(self.program, node)) is not None:
            self.reasons.append("secrets come from environment variables")
            return variable
        self.generic_visit(node)
        of_trl = last in PROVIDED and name.split(".")[0] == "trl"
        if isinstance(node.func, ast.Attribute) and (last in ("SFTTrainer", *CONFIGS) or of_trl):
            node.func = ast.Name(last, ast.Load())
        elif last == "from_pretrained":
            self._loader(node, name)
        elif last in ("to", "cuda") and self._moves_a_model(node):
            assert isinstance(node.func, ast.Attribute)
            return node.func.value
        elif last == "cuda" and node.args:
            node.args = []
        for item in node.keywords:  # also of `dict(device_map="auto")`, which a loader is given
            if item.arg == "device_map" and not _on_cpu(item.value):
                item.value = self._this_device()
        node.keywords = [item for item in node.keywords if item.arg != "push_to_hub"]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        for number, key in enumerate(node.keys):
            if isinstance(key, ast.Constant) and key.value == "device_map" and not _on_cpu(node.values[number]):
                node.values[number] = self._this_device()
        return node

    def _this_device(self) -> ast.expr:
        self.reasons.append("each rank has its own device")
        return ast.parse('{"": PartialState().device}', mode="eval").body

    def _loader(self, node: ast.Call, name: str) -> None:
        """Load onto this rank's device. Unsloth finds it by itself."""
        if name.startswith("transformers."):
            self._former(node)
        own = re.search(r"\bFast\w*Model\b|Tokenizer", name) is not None
        for item in list(node.keywords):
            if item.arg == "max_memory" or item.arg == "device_map" and own and not _on_cpu(item.value):
                node.keywords.remove(item)
                self.reasons.append("each rank has its own device")

    def _former(self, node: ast.Call) -> None:
        """Arguments that loaders had before transformers 5."""
        names = {item.arg for item in node.keywords}
        for item in list(node.keywords):
            off = isinstance(item.value, ast.Constant) and not item.value.value
            if item.arg == "use_auth_token":
                item.arg = "token"
            elif item.arg == "resume_download" or item.arg in FORMER and (off or "quantization_config" in names):
                node.keywords.remove(item)
            elif item.arg == "use_flash_attention_2":
                node.keywords.remove(item)
                if not off:
                    node.keywords.append(ast.keyword("attn_implementation", ast.Constant("flash_attention_2")))
            elif quantizes_by(item, names):
                given: ast.expr = ast.Dict([ast.Constant(item.arg)], [ast.Constant(True)])
                if not isinstance(item.value, ast.Constant):
                    given = ast.IfExp(item.value, given, ast.Constant(None))
                item.value, item.arg = given, "quantization_config"
            else:
                continue
            self.reasons.append("the loader has other arguments now")

    def _moves_a_model(self, node: ast.Call) -> bool:
        """`AutoModel.from_pretrained(...).to("cuda")`"""
        inside = node.func.value if isinstance(node.func, ast.Attribute) else None
        last = self.program.dotted(inside.func).rsplit(".", 1)[-1] if isinstance(inside, ast.Call) else ""
        on_cpu = any(_on_cpu(one) for one in node.args)
        if last in ("from_pretrained", "get_peft_model") and moves(self.program, node) and not on_cpu:
            self.reasons.append("each rank has its own device")
            return True
        return False

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        name = str(getattr(node.slice, "value", ""))
        if isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "os.environ" and is_token(name):
            self.reasons.append(f"without {name}, the token of `hf auth login` is used")
            return ast.copy_location(expression("os.environ.get(NAME)", NAME=node.slice), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and re.fullmatch(r"cuda:\d+", node.value):
            self.reasons.append("each rank has its own device")
            return ast.copy_location(ast.Constant("cuda"), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self.program.dotted(node) in ("trl.SFTTrainer", "trl.SFTConfig", "transformers.TrainingArguments"):
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        owner = getattr(node.value, "id", "") or getattr(node.value, "attr", "")
        if node.attr == "tokenizer" and (owner in self.trainers or "trainer" in owner.lower()):
            self.reasons.append("`tokenizer` is `processing_class` now")
            node.attr = "processing_class"
        return node


_TRACKERS = ("wandb", "mlflow", "comet_ml", "trackio", "neptune")
_INT8, _KBIT = "prepare_model_for_int8_training", "prepare_model_for_kbit_training"
FORMER = ("load_in_4bit", "load_in_8bit")  # of a loader, now in a BitsAndBytesConfig


def _receiver(node: ast.stmt) -> str:
    """`run` of the statement `run.log(values)`."""
    call = lone_call(node)
    return ast.unparse(call.func.value) if call is not None and isinstance(call.func, ast.Attribute) else ""


def quantizes_by(item: ast.keyword, names: Set[str | None]) -> bool:
    """Whether it is `load_in_4bit=True`, or a variable, of a loader that is given nothing else about the
    quantization."""
    alone = not any(str(name).startswith(("bnb_", "quantization_config", "llm_int8")) for name in names)
    on = isinstance(item.value, ast.Constant) and item.value.value is True
    only = isinstance(item.value, ast.Name | ast.Attribute | ast.Subscript) and len(names & set(FORMER)) == 1
    return alone and item.arg in FORMER and (on or only)


def _on_cpu(node: ast.expr) -> bool:
    """`None`, `"cpu"` and `{"": "cpu"}`, which stay."""
    return re.fullmatch(r"None|'cpu'|\{'': '?cpu'?\}|(torch\.)?device\('cpu'\)", ast.unparse(node)) is not None


def _key(node: ast.expr) -> object:
    """The key of `options["device_map"]`."""
    return node.slice.value if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) else None


def _names(node: ast.ImportFrom) -> list[str]:
    return [alias.asname or alias.name for alias in node.names]


def _secret(program: Program, node: ast.expr) -> ast.expr | None:
    """The environment variable that replaces the secret of a hosted service."""
    if not isinstance(node, ast.Call) or not (
        matches("secret", program.dotted(node.func) or ast.unparse(node.func)) and node.args
    ):
        return None
    return expression("os.environ.get(NAME)", NAME=node.args[0])


_PIP = re.compile(r"\b(pip3?|apt|apt-get|conda|uv)\b.{0,40}\binstall\b")


def commands(node: ast.AST) -> list[str]:
    """The commands that it starts, as far as they are literals."""
    return [command for command in map(_command, calls(node)) if command is not None]


def only_installs(node: ast.AST) -> bool:
    """Whether it starts commands, and each installs packages."""
    parts = [part for command in commands(node) for part in re.split(r"&&|;|\|\|?", command)]
    return bool(commands(node)) and all(_PIP.search(part) for part in parts if part.strip())


def _command(call: ast.Call) -> str | None:
    """The words of a command that a call starts, as far as they are literals; None if it starts none."""
    if not re.search(r"(^|\.)(run|call|check_call|check_output|Popen|getoutput|system|popen)$", ast.unparse(call.func)):
        return None
    words = [one.value for item in call.args[:1] for one in ast.walk(item) if isinstance(one, ast.Constant)]
    return " ".join(str(word) for word in words)


def is_push(program: Program, call: ast.Call) -> bool:
    """Whether a call publishes something."""
    name = method(call) or program.dotted(call.func).rsplit(".", 1)[-1]
    return name.startswith(("push_to_hub", "upload_f", "create_repo", "upload_large")) or name == "upload_model"


def to_publish(node: ast.AST) -> str:
    """What the user does in place of the pushes in a statement."""
    kinds = [method(call).removeprefix("push_to_hub") for call in calls(node) if method(call).startswith("push_to_hub")]
    folder = next((f"folder that save_pretrained{kind} writes" for kind in kinds if kind), "finished folder")
    return f"publish the {folder} with `hf upload`"


def saves(node: ast.AST) -> bool:
    """Whether it saves or exports a model, a tokenizer or a trainer's state."""
    return any(
        (method(call) or getattr(call.func, "id", "")) in named("saves") | named("exports")
        and not method(call).startswith("push_to_hub")
        or ast.unparse(call.func) == "torch.save"
        for call in calls(node)
    )


_INFERENCE = re.compile(r"\.generate\(|for_inference|TextStreamer|TextIteratorStreamer|\b(?>\w*?pipe)\w*\(")


def infers(node: ast.AST) -> bool:
    """Whether it tries a model."""
    text = ast.unparse(node)
    return _INFERENCE.search(text) is not None and not re.search(r"\.(map|filter)\(", text)


def only_merges(node: ast.AST) -> bool:
    """Whether it merges an adapter under a name and saves nothing: `merged = model.merge_and_unload()`."""
    merge = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and not saves(node.value.func)
    return merge and method(node.value) == "merge_and_unload"  # type: ignore[attr-defined]


def runs_together(node: ast.AST) -> bool:
    """Whether it calls a method of the trainer's that every rank must call."""
    return any(method(call) in named("on every rank") for call in calls(node))


def writes_files(program: Program, node: ast.stmt) -> bool:
    """Whether running the statement writes a file; functions of the notebook that it calls count."""
    if isinstance(node, DEFINITIONS):
        return False
    if any(written_path(call) is not None or method(call) in _DUMPS for call in calls(node)):
        return True
    runs: list[ast.AST] = []
    for one in program.called(node):  # making an object of a class runs its constructor
        parts = one.body if isinstance(one, ast.ClassDef) else [one]
        runs += [part for part in parts if part is one or getattr(part, "name", "") == "__init__"]
    return any(written_path(call) is not None for one in runs for call in calls(one))


def _only_writes(node: ast.stmt) -> bool:
    """Whether a statement writes a file and computes nothing that others use."""
    writes = any(written_path(call) is not None for call in calls(node))
    return writes and isinstance(node, ast.Expr | ast.With) and not binds(node)


_DUMPS = "makedirs mkdir rmtree copytree make_archive move copyfile unzip extractall urlretrieve".split()


def guarded(condition: str, body: list[ast.stmt]) -> ast.stmt:
    node = ast.If(test=ast.parse(condition, mode="eval").body, body=body, orelse=[])
    return ast.fix_missing_locations(node)


def reads(node: ast.stmt) -> set[str]:
    """Names that a statement needs from outside."""
    e = effects(node)
    return e.all_reads | e.changes


def binds(node: ast.stmt) -> set[str]:
    return effects(node).all_binds


def filled(node: ast.stmt) -> set[str]:
    """Collections that a statement fills: `rows.append(one)`, `rows["text"] = one`, `rows += [one]`."""
    receivers = [call.func for call in calls(node) if method(call) in named("fills")]
    stores = [one for one in ast.walk(node) if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store)] + [
        one.target for one in ast.walk(node) if isinstance(one, ast.AugAssign)
    ]
    return {name for one in [*receivers, *stores] if (name := root(one)) is not None} - effects(node).binds
