"""The rules of `finetune review`.

Each is a pure function of a run, and of the runs it is compared with, that returns a `Finding` or None. Thresholds are
constants beside the rule, and its docstring names their source. "Calibrated" means at least three times the largest
value of all healthy fixtures, which tests/review recomputes. explanations.md is what users read of the rules.
"""

import functools
import re
from pathlib import Path

from finetune.review.finding import Explanation, Rule
from finetune.review.rules import data, hang, learning, memory, ranks, routing, speed, straggler
from finetune.runtime import files

# The two halves of the verdict: what the run does to the model, and where its time goes.
LEARNING: dict[str, Rule] = {
    "not-finite": learning.not_finite,
    "diverging": learning.diverging,
    "frozen": learning.frozen,
    "answers": learning.answers,
    "spikes": learning.spikes,
    "updates-lost": learning.updates_lost,
    "collapsed-routing": routing.collapsed,
    "overfitting": learning.overfitting,
    "leak": data.leak,
    "rows-lost": data.rows_lost,
}
SPEED: dict[str, Rule] = {
    "hang": hang.check,
    "straggler": straggler.check,
    "data-wait": speed.data_wait,
    "communication": ranks.communication,
    "efficiency": ranks.efficiency,
    "padding": speed.padding,
    "host-bound": speed.host_bound,
    "small-batch": speed.small_batch,
    "evaluation-share": speed.evaluation_share,
    "memory-near-limit": memory.near_limit,
    "throttling": ranks.throttling,
}
RULES = LEARNING | SPEED


@functools.cache
def explanations() -> dict[str, Explanation]:
    """What users read of each rule, by its name: `explanations.md`, in which each has a heading, a question and a list
    of parts."""
    page = files.read_text(Path(__file__).with_name("explanations.md"))
    found = {}
    for name, question, parts in re.findall(r"^### (\S+)\n\n(.+)\n\n((?:- .+\n)+)", page, re.MULTILINE):
        found[name] = Explanation(question, dict(re.findall(r"^- \*\*(.+?)\.\*\* (.+)$", parts, re.MULTILINE)))
    return found
