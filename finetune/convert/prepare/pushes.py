"""Save what a notebook makes only to publish it, such as a merged model: the drop-in script publishes nothing.

`model.push_to_hub_merged("me/birds", tokenizer)` becomes `model.save_pretrained_merged("birds", tokenizer)`. A plain
`push_to_hub` of the trained model does not: the finished folder has its adapter.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator

from finetune.convert.analysis.classify import live
from finetune.convert.analysis.names import method, passed, root
from finetune.convert.knowledge import named
from finetune.convert.notebook.read import Notebook
from finetune.convert.source import expression

# What Unsloth's `push_to_hub_KIND` and `save_pretrained_KIND` are both given after the repository or the folder. The
# plain pair is for a model that PEFT merged.
_GIVEN: dict[str, tuple[str, ...]] = {
    "": (),
    "_merged": ("tokenizer", "save_method"),
    "_gguf": ("tokenizer", "quantization_method", "first_conversion"),
    "_openvino": ("tokenizer", "quantization_type"),
    "_torchao": ("tokenizer", "torchao_config"),
}
_OF_HUB = frozenset(
    "repo_id use_temp_dir commit_message commit_description private token create_pr revision tags datasets"
    " push_to_hub".split()
)
_PUSH, _SAVE = "push_to_hub", "save_pretrained"


def save_what_is_pushed(notebook: Notebook) -> list[str]:
    """Write such calls as saves, in place. Returns notes for the report."""
    nodes = [node for _, node in live(notebook.statements)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    saved = {_product(call, _SAVE) for call in calls}
    pushes: dict[int, list[tuple[ast.Call, str]]] = {}
    for place, call, kind in _pushes(notebook):
        product = _product(call, _PUSH)
        if product is not None and product not in saved and passed(call, "repo_id"):
            pushes.setdefault(place, []).append((call, kind))
    kinds = {_repository(call): kind for each in pushes.values() for call, kind in each}
    for place, call in _tokenizers(notebook, kinds):
        pushes.setdefault(place, []).append((call, ""))
    notes: list[str] = []
    pushed = [call for call in calls if getattr(call.func, "attr", "").startswith(_PUSH)]
    taken = _texts(nodes, [one for call in pushed for one in passed(call, "repo_id")[:1]])
    for place, each in sorted(pushes.items()):
        statement, source = notebook.statements[place], notebook.statements[place].source
        for call, kind in each:
            folder = _folder(passed(call, "repo_id")[0], kinds[_repository(call)] or "_merged", taken, nodes)
            segment = ast.get_source_segment(statement.source, call)
            assert segment is not None
            source = source.replace(segment, ast.unparse(_saving(call, kind, folder)))
            where = "the folder next to it that ends with _gguf" if kind == "_gguf" else "this folder"
            notes.append(
                f"cell {statement.cell}: `{ast.unparse(call)[:60]}` saves to {ast.unparse(folder)} and publishes"
                f" nothing: publish {where} with `hf upload`"
            )
        notebook.statements[place] = statement.reading(source)
    return notes


def _pushes(notebook: Notebook) -> Iterator[tuple[int, ast.Call, str]]:
    """The calls from the training on that publish something made for it, with the place of their statement and their
    kind."""
    merged: set[str] = set()
    trained = False
    for place, statement in enumerate(notebook.statements):
        trained = trained or any(getattr(node, "attr", "") == "train" for _, node in live([statement]))
        for _, node in live([statement]):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                (merged.add if _merges(node.value) else merged.discard)(node.targets[0].id)
            if not trained or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            kind = node.func.attr.removeprefix(_PUSH)
            whole = _merges(node.func.value) or getattr(node.func.value, "id", None) in merged
            if node.func.attr in named("exports") and node.func.attr.startswith(_PUSH) and (kind or whole):
                yield place, node, kind


def _tokenizers(notebook: Notebook, repositories: Container[str]) -> Iterator[tuple[int, ast.Call]]:
    """The pushes of a tokenizer or processor into these repositories."""
    for place, statement in enumerate(notebook.statements):
        for _, node in live([statement]):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != _PUSH:
                continue
            of = str(root(node.func)).lower()
            if ("token" in of or "processor" in of) and _repository(node) in repositories:
                yield place, node


def _merges(value: ast.expr) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "merge_and_unload" for one in ast.walk(value))


def _repository(push: ast.Call) -> str:
    """Where it goes, as the notebook writes it."""
    return next(map(ast.unparse, passed(push, "repo_id")), "")


def _product(call: ast.Call, verb: str) -> tuple[str, ...] | None:
    """What a push or a save makes, wherever it goes; None if the call is neither, or not clear."""
    name = method(call)
    kind = name.removeprefix(verb)
    unclear = any(isinstance(one, ast.Starred) for one in call.args) or any(item.arg is None for item in call.keywords)
    if not isinstance(call.func, ast.Attribute) or not name.startswith(verb) or kind not in _GIVEN or unclear:
        return None
    given = {key: ast.unparse(value) for key, value in zip(_GIVEN[kind], call.args[1:], strict=False)}
    given |= {str(item.arg): ast.unparse(item.value) for item in call.keywords if item.arg not in _OF_HUB}
    given.pop("save_directory", None)
    return ast.unparse(call.func.value), kind, *(f"{key}={given[key]}" for key in sorted(given))


def _saving(push: ast.Call, kind: str, folder: ast.expr) -> ast.Call:
    """The save in place of a push, without what only the Hub is told."""
    assert isinstance(push.func, ast.Attribute)
    function = ast.Attribute(push.func.value, _SAVE + kind, ast.Load())
    arguments = push.args[1 : 1 + len(_GIVEN[kind])]
    keywords = [item for item in push.keywords if item.arg not in _OF_HUB]
    return ast.Call(function, [folder, *arguments], keywords)


def _texts(nodes: list[ast.AST], repositories: list[ast.expr]) -> set[str]:
    """The texts of the notebook that may be other folders, such as `output_dir`."""
    own = {id(inner) for one in repositories for inner in ast.walk(one)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in own]
    return {text.removeprefix("./").strip("/") for text in texts if isinstance(text, str)}


def _folder(repository: ast.expr, kind: str, taken: set[str], nodes: list[ast.AST]) -> ast.expr:
    """The repository's name without its account, as a folder that the notebook uses for nothing else."""
    suffix, text = kind.replace("_", "-"), _end(repository, nodes)
    if text is None:
        return expression("REPOSITORY.rsplit('/', 1)[-1] + SUFFIX", REPOSITORY=repository, SUFFIX=ast.Constant(suffix))
    name = text.strip("/").rsplit("/", 1)[-1].strip(".") or "model"
    return ast.Constant(name + suffix if name in taken else name)


def _end(value: ast.expr, nodes: list[ast.AST]) -> str | None:
    """A text, or the end of one behind its last `/`; None if that is not written in the notebook."""
    if isinstance(value, ast.Name):
        stores = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        given = [node for node in nodes if isinstance(node, ast.arg) and node.arg == value.id]
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        made = [one.value for one in assigned if value.id in [getattr(target, "id", "") for target in one.targets]]
        once = not given and len(made) == [node.id for node in stores].count(value.id) == 1
        return _end(made[0], nodes) if once and not isinstance(made[0], ast.Name) else None
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    last = value.values[-1] if isinstance(value, ast.JoinedStr) and value.values else getattr(value, "right", None)
    text = last.value if isinstance(last, ast.Constant) else None
    return text if isinstance(text, str) and "/" in text else None
