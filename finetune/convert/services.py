"""The folders of hosted services: Colab, Kaggle, RunPod, and Google Drive as Colab mounts it."""

from __future__ import annotations

import re

# Where hosted services start a notebook: there "/content/rows.jsonl" and "rows.jsonl" are one file.
WORKING_FOLDERS = ("/content", "/kaggle/working", "/workspace")
# Google Drive, which outlives the notebook's machine.
_DRIVES = tuple(f"/content/{mount}/{name}" for mount in ("drive", "gdrive") for name in ("MyDrive", "My Drive"))
SERVICE_FOLDERS = (*_DRIVES, *WORKING_FOLDERS, "/kaggle/temp")


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def is_hosted(path: str) -> bool:
    """Whether it is a path on a hosted service."""
    return any(is_below(path, folder) for folder in (*SERVICE_FOLDERS, "/kaggle", "../input"))


def below_working_folder(path: str, *, drives: bool = False) -> str:
    """A path without the service's folder. `drives`: keep the name of a Google Drive, `drive/MyDrive/birds`."""
    folders = [one for one in SERVICE_FOLDERS if not (drives and one in _DRIVES)]
    folder = next((one for one in folders if is_below(path, one)), None)
    if folder is None:
        return path
    return path.removeprefix(folder).lstrip("/") or ("./" if path.endswith("/") else ".")


_STARTS = re.compile(
    rf"""(?<=["'\s])(?:{"|".join(map(re.escape, SERVICE_FOLDERS))})(?:/+(?=[^"'\s/])|(?=/?(?:["'\s]|$)))"""
)


def in_working_folder(text: str) -> str:
    """A text, such as code or YAML, with the services' folders as the working folder, wherever a path starts so."""
    return _STARTS.sub(lambda found: "" if found[0].endswith("/") else ".", text)
