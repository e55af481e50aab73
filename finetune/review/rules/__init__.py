"""The rules of `finetune review`.

Each is a pure function of a run, and of the runs it is compared with, that returns a `Finding` or None. Thresholds are
constants beside the rule, and its docstring names their source. "Calibrated" means at least three times the largest
value of all healthy fixtures, which tests/review recomputes. `EXPLANATIONS` at the end of each module is what users
read of its rules.
"""

from finetune.review.finding import Explanation, Rule
from finetune.review.rules import data, hang, learning, memory, ranks, routing, speed, straggler

RULES: dict[str, Rule] = {
    "hang": hang.check,
    "not-finite": learning.not_finite,
    "diverging": learning.diverging,
    "frozen": learning.frozen,
    "spikes": learning.spikes,
    "clipping": learning.clipping,
    "updates-lost": learning.updates_lost,
    "collapsed-routing": routing.collapsed,
    "overfitting": learning.overfitting,
    "leak": data.leak,
    "rows-lost": data.rows_lost,
    "similar-steps": data.similar_steps,
    "straggler": straggler.check,
    "data-wait": speed.data_wait,
    "communication": ranks.communication,
    "efficiency": ranks.efficiency,
    "padding": speed.padding,
    "host-bound": speed.host_bound,
    "small-batch": speed.small_batch,
    "evaluation-share": speed.evaluation_share,
    "memory-near-limit": memory.near_limit,
    "memory-uneven": ranks.memory_uneven,
    "throttling": ranks.throttling,
    "plateau": learning.plateau,
    "too-slow": learning.too_slow,
}

_EXPLANATIONS: dict[str, Explanation] = {
    **hang.EXPLANATIONS,
    **learning.EXPLANATIONS,
    **routing.EXPLANATIONS,
    **data.EXPLANATIONS,
    **straggler.EXPLANATIONS,
    **speed.EXPLANATIONS,
    **ranks.EXPLANATIONS,
    **memory.EXPLANATIONS,
}
EXPLANATIONS: dict[str, Explanation] = {name: _EXPLANATIONS[name] for name in RULES}
