"""What the Review tab shows, and the same as one file of HTML that needs neither TensorBoard nor a network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any

from finetune.review import labels
from finetune.review.rules import explanations
from finetune.runtime.tags import PHASES
from finetune.runtime.types import JsonObject
from finetune.text import counted

NAMED = 3  # runs in a title

# Nothing is loaded and only this script runs, whatever the names in a review contain.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'">
<title>{title}</title>
</head>
<body>
<script type="application/json" id="review">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def content(review: JsonObject) -> JsonObject:
    """A review with what else the tab needs: the phases in order, label, unit and meaning of each metric, and what
    the rules mean that found something.

    Args:
        review: `assemble.review(...).to_dict()`.
    """
    found = {finding["rule"] for run in review["runs"] for finding in run.get("findings", [])}
    rules = {name: asdict(one) for name, one in explanations().items() if name in found}
    return _without_nan({**review, "phases": PHASES, "names": labels.described(), "rules": rules})


def html(review: JsonObject) -> str:
    """A review as one file of HTML: it holds script and data, asks no host, and shows what the Review tab shows, under
    a heading that says what was reviewed and when.

    Args:
        review: `assemble.review(...).to_dict()`.
    """
    heading = title([run["run"] for run in review["runs"]])
    report = {"title": heading, "written": time.time()}
    # "<" would let a run's name end the script element. `dumps` escapes non-ASCII characters such as U+2028.
    data = json.dumps(content(review) | {"report": report}, allow_nan=False).replace("<", "\\u003c")
    script = resources.files("finetune.review.board").joinpath("tab.js").read_text(encoding="utf-8") + "\nrender();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _PAGE.format(digest=digest, data=data, script=script, title=escape(heading))


def title(names: Sequence[str]) -> str:
    """Names the runs: at most three, and how many more there are."""
    shown = ", ".join(names[:NAMED])
    return f"Review of {shown}" + (f" and {counted(len(names) - NAMED, 'more run')}" if len(names) > NAMED else "")


def _without_nan(value: object) -> Any:
    """A copy in which NaN and infinity are words, as JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return value
