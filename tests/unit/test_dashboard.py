"""How TensorBoard is started."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from finetune import dashboard


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")  # of TensorBoard in its own copy
def test_review_is_the_first_tab(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tab that does not fit the window is cut off, and TensorBoard puts plugins of others last."""
    order: list[str] = []

    class Server:
        def __init__(self, plugins: list[Any]) -> None:
            order.extend(str(getattr(plugin, "plugin_name", "core")) for plugin in plugins)

        def configure(self, **options: Any) -> None:
            pass

        def launch(self) -> str:
            return "http://localhost:1/"

    program = importlib.import_module("tensorboard.program")  # `tensorboard.program` is a proxy until it is imported
    monkeypatch.setattr(program, "TensorBoard", Server)
    assert dashboard.start(tmp_path, "localhost", 0) == "http://localhost:1/"
    assert order[:2] == ["core", "finetune"] and order.count("finetune") == 1 and "custom_scalars" in order
