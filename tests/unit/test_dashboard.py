"""TensorBoard's plain address: where it goes on, and what it leaves alone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from finetune import dashboard


def ask(path: str, query: str) -> list[bytes]:
    def tensorboard(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        return [b"its own answer"]

    return dashboard.beginning(tensorboard)({"PATH_INFO": path, "QUERY_STRING": query}, lambda status, headers: None)


@pytest.mark.parametrize(("path", "query"), [("/", "smoothing=0.6"), ("/data/runs", ""), ("/index.js", "x=1")])
def test_all_but_the_plain_address_is_tensorboards(path: str, query: str) -> None:
    assert ask(path, query) == [b"its own answer"]


def test_the_plain_address_goes_on_without_smoothing() -> None:
    (page,) = ask("/", "")
    assert b"?smoothing=0&pinnedCards=" in page and b"&_smoothingWeight=0" in page and b"sha256-" in page


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")  # of TensorBoard in its own copy
def test_review_is_the_first_tab(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tab that does not fit the window is cut off, and TensorBoard puts plugins of others last."""
    order: list[str] = []

    class Server:
        def __init__(self, plugins: list[Any], server_class: Any) -> None:
            order.extend(str(getattr(plugin, "plugin_name", "core")) for plugin in plugins)

        def configure(self, **options: Any) -> None:
            pass

        def launch(self) -> str:
            return "http://localhost:1/"

    program = importlib.import_module("tensorboard.program")  # `tensorboard.program` is a proxy until it is imported
    monkeypatch.setattr(program, "TensorBoard", Server)
    assert dashboard.start(tmp_path, "localhost", 0) == "http://localhost:1/"
    assert order[:2] == ["core", "finetune"] and order.count("finetune") == 1 and "custom_scalars" in order
