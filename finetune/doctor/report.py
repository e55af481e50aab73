"""The report as text, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from finetune.doctor.inspect import Findings
from finetune.redact import MASK, is_secret_name, redact_tree
from finetune.runtime.types import JsonObject
from finetune.text import counted

Rows = list[tuple[str, str]]
_SHORTEST_SECRET = 8  # characters; a shorter value of a secret name may be a word that the report needs
_END = r"(?=[/\s'\":;,)\]}]|$)"  # of a folder's name inside a text


def without_secrets(found: Any) -> Any:
    """The same with secrets, values of variables with secret names, and home folders masked in every text."""
    secrets = [value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= _SHORTEST_SECRET]
    secrets.sort(key=len, reverse=True)  # one may be part of another
    own = [re.escape(str(Path.home()))] if len(Path.home().parts) > 1 else []
    home = re.compile(r"(?<![\w.~-])(?:" + "|".join([*own, r"/(?:home|Users)/[^/\s'\":]+", "/root"]) + ")" + _END)

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, MASK)
            return home.sub("~", value)
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list | tuple) else value

    return walk(redact_tree(walk(found)))


def plain_text(found: Findings) -> str:
    """The report as lines of text, for a bug report."""
    lines = [line for _, line in headline(found)]
    for title, rows in sections(found):
        width = max(len(label) for label, _ in rows)
        lines += ["", title, *(f"  {label:{width}}  {value}" for label, value in rows)]
    return "\n".join(lines) + "\n"


def headline(found: Findings) -> list[tuple[str, str]]:
    """(state, line): whether a run could start, what would stop it, and the warnings."""
    of_state = {state: [one for one in found["checks"] if one["state"] == state] for state in ("stop", "warning")}
    state, verdict = ("stop", "would not") if of_state["stop"] else ("ok", "could")
    lines = [(state, f"finetune doctor: a run {verdict} start here.")]
    for state, checks in of_state.items():
        lines += [(state, f"  {state}: {one['name']}: {one['reason']}") for one in checks]
    return lines


def sections(found: Findings) -> Iterable[tuple[str, Rows]]:
    """Title and (label, value) rows of each part."""
    unknown, stack, machine, launcher = (found[name] for name in ("unknown", "stack", "machine", "launcher"))
    yield "Checks", [(one["name"], f"{one['state']}: {one['reason']}") for one in found["checks"]]
    absent = {name: f"unknown: {unknown[name]}" if name in unknown else "not installed" for name in found["versions"]}
    yield "Versions", [(name, value or absent[name]) for name, value in found["versions"].items()]
    yield "Devices", _device_rows(found)
    if found["topology"]:
        yield "Topology", _topology_rows(found)
    shared = machine["shared_memory_gib"]
    rows = [("processor", f"{machine['processor']}, {counted(machine['cores'], 'core')} for this process")]
    rows += [("memory", f"{machine['memory_gib']:.1f} GiB, {machine['free_gib']:.1f} free")]
    yield "Machine", [*rows, ("/dev/shm", "unknown: there is none" if shared is None else f"{shared:.2f} GiB")]
    if "error" in stack:
        yield "Backend", [("none", "see the checks")]
    else:
        yield "Backend", [(stack["backend"], f"{stack['reason']}; device {stack['device']}")]
        rows = [(patch["name"], _verdict(patch)) for patch in stack["patches"]]
        yield "Patches", rows or [("none", "Unsloth's are not checked on this backend")]
    yield "Folders", [(one["name"], _folder_line(one)) for one in found["folders"]]
    yield "Launcher", [("ranks", ", ".join(f"{key} {value}" for key, value in launcher.items()))]
    yield "Environment", list(found["environment"].items()) or [("none", "none of the variables shown here is set")]
    shown = {*found["versions"], "devices"}
    rest = [(name, why) for name, why in unknown.items() if name not in shown]
    if rest:
        yield "Unknown", rest


def _device_rows(found: Findings) -> Rows:
    rows = []
    for device in found["devices"]:
        free = "free memory unknown" if device["free_gib"] is None else f"{device['free_gib']:.1f} free"
        about = f"{device['name']}, compute capability {device['compute_capability']}"
        rows.append((f"GPU {device['index']}", f"{about}, {device['memory_gib']:.1f} GiB, {free}"))
    return rows or [("none", found["unknown"].get("devices", "torch sees none"))]


def _topology_rows(found: Findings) -> Rows:
    """One row if all pairs are alike, as on a machine with switches; else one row per pair."""
    peers = {True: "peer access", False: "no peer access", None: "peer access unknown"}
    rows = [
        ("GPUs {} and {}".format(*pair["gpus"]), f"{pair['kind'] or 'unknown link'}, {peers[pair['peer_access']]}")
        for pair in found["topology"]
    ]
    if len(rows) > 1 and len({value for _, value in rows}) == 1:
        rows = [(f"all {len(rows)} pairs", rows[0][1])]
    return [("machine", found["topology_line"]), *rows]


def _verdict(patch: JsonObject) -> str:
    state = "applied" if patch["applied"] else "not applied" if patch["needed"] is not False else "not needed"
    return f"{state}: {patch['reason']}"


def _folder_line(one: JsonObject) -> str:
    disk = f"{one['disk_free_gib']:.1f} GiB free on {one['file_system'] or 'an unknown file system'}"
    return f"{one['path']} ({disk}{'' if one['writable'] else '; cannot be written'})"
