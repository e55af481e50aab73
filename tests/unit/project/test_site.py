"""The documentation as a site, as far as it needs no mkdocs: navigation and links. `make site` checks the rest."""

from __future__ import annotations

import ast
import importlib.util
import re
import types
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

FOLDER = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", FOLDER / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pages(tmp_path: Path) -> types.SimpleNamespace:
    """What mkdocs passes to the hooks, for a table of two pages."""
    for name in ("README.md", "NEW.md", "docs/a.md", "docs/new.md", "examples/x.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    table = "[README](../README.md)\n| [About a](a.md) | see [b](b.md#part) |\n| [x](../examples/x.yaml) |"
    (tmp_path / "docs" / "index.md").write_text(table)
    return types.SimpleNamespace(docs_dir=str(tmp_path), nav=None)


def test_navigation_is_the_table_and_what_it_lacks(hooks: Any, pages: types.SimpleNamespace) -> None:
    assert hooks.on_config(pages).nav == [
        {"Start": "README.md"},
        {"All pages": "docs/index.md"},
        {"About a": "docs/a.md"},
        {"b": "docs/b.md"},
        {"More": ["docs/new.md", "NEW.md"]},
    ]


def test_links_to_folders_become_their_names(hooks: Any, pages: types.SimpleNamespace) -> None:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="docs/a.md"), meta={})
    text = "[`examples/`](../examples) [x](../examples/x.yaml) [a](#a) ![e](../examples) [new](new.md#b) [w](https://x.org)"
    changed = hooks.on_page_markdown(text, page, pages, None)
    assert changed == text.replace("[`examples/`](../examples)", "`examples/`")
    assert page.meta == {}
    page.file.src_uri = "CHANGELOG.md"
    hooks.on_page_markdown(text, page, pages, None)
    assert page.meta == {"search": {"exclude": True}}


def test_every_page_of_docs_is_in_the_table() -> None:
    table = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", table)) == {
        path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"
    }


def test_the_reference_names_what_exists() -> None:
    """And all that `finetune` exports. Read, not imported: Unsloth would have to come first."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    for path, _, name in (one.rpartition(".") for one in named):
        tree = ast.parse(ROOT.joinpath(*path.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        assert len(found) == 1 and ast.get_docstring(found[0]), f"{path}.{name}"
    exported = {"SFTConfig", "SFTTrainer", "TrainingArguments", "DataCollatorForCompletionOnlyLM", "setup_chat_format"}
    assert exported <= {one.rpartition(".")[2] for one in named}


def test_the_site_asks_no_other_host() -> None:
    """No fonts from elsewhere, and versions that are pinned."""
    settings = (FOLDER / "mkdocs.yml").read_text(encoding="utf-8")
    assert (
        "font: false" in settings and "http" not in re.sub("http.server", "", settings) and "strict: true" in settings
    )
    lines = (FOLDER / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))


def test_what_the_site_cannot_draw_is_not_in_its_pages() -> None:
    """A diagram would be shown as its source: what draws it would be loaded from another host."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert [page.name for page in pages if "```mermaid" in page.read_text(encoding="utf-8")] == []
    (style,) = re.findall(r"^extra_css: \[(.+)\]$", (FOLDER / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert (ROOT / style).is_file()
