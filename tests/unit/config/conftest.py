"""Fixtures of the tests of config."""

import pytest


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
