"""Settings must not depend on conditions that are only known at run time, such as the GPU's memory or a package that
may be missing. The recording stubs report each such condition; the notebook runs again with other values for them, and
the settings must stay the same. If they differ, a settings file cannot hold them, but a drop-in script can.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable
from typing import Any

from finetune.convert.names import Program
from finetune.convert.read import Refusal
from finetune.convert.roles import Plan, event_of
from finetune.convert.trace import ASSUMPTIONS, Trace, trace_with
from finetune.convert.values import Settings, described

ALL = 6  # conditions of which every combination runs; of more, each alone and each pair
RUNS = 200
FREE = (
    "model.attn_implementation",  # may follow the device: the result is the same, and a note says so
    "training.output_dir",  # the folder of a save after training, which may fail; the result is saved in any case
)


def refuse_choices(plan: Plan, settings: Settings, traces: list[Trace], settings_of: Callable[..., Settings]) -> None:
    """Refuse (R4) settings that depend on a condition only known at run time.

    Args:
        settings_of: derives the settings from the plan and a list of traces.
    """
    program = plan.program
    needed = _statements_of_settings(plan)
    seen = {_key(assumed, {}) for assumed in ASSUMPTIONS}
    found = dict(zip(ASSUMPTIONS, traces, strict=True))
    pending: deque[tuple[bool, dict[str, bool], Trace]] = deque((one, {}, trace) for one, trace in found.items())
    runs = 0
    while pending:
        jobs: list[tuple[bool, dict[str, bool]]] = []
        while pending:
            assumed, choices, trace = pending.popleft()
            _compare(plan, settings, traces, trace, choices, settings_of)
            decisions = _relevant(program, trace, needed)
            if len(choices) >= (len(decisions) if len(decisions) <= ALL else 2):
                continue
            for key, decision in decisions.items():
                flipped = {**choices, key: not decision["value"]}
                if key not in choices and _key(assumed, flipped) not in seen:
                    seen.add(_key(assumed, flipped))
                    jobs.append((assumed, flipped))
        runs += len(jobs)
        if runs > RUNS:
            raise Refusal(
                "R4",
                f"the settings may depend on more conditions than can be compared ({len(decisions)}), which are only"
                f" known at run time, such as `{next(iter(decisions.values()))['words'][:80]}`; write constants",
            )
        new = trace_with(program.statements, jobs) if jobs else []
        pending.extend((assumed, choices, trace) for (assumed, choices), trace in zip(jobs, new, strict=True))


def _key(assumed: bool, choices: dict[str, bool]) -> str:
    return f"{assumed} {sorted(choices.items())}"


def _relevant(program: Program, trace: Trace, needed: set[int]) -> dict[str, dict[str, Any]]:
    """The conditions that were decided in statements which the settings depend on."""
    return {
        key: decision
        for key, decision in trace["decisions"].items()
        if decision["statement"] is not None and program.position(decision["statement"]) in needed
    }


def _compare(
    plan: Plan,
    settings: Settings,
    traces: list[Trace],
    trace: Trace,
    choices: dict[str, bool],
    settings_of: Callable[..., Settings],
) -> None:
    if any(event_of(trace, kind) is None for kind in ("load", "trainer", "train")):
        return  # in this case the notebook ends before it trains
    if (described(trace).adapter or {}).get("target_modules") == []:
        return  # no such adapter can be created
    other = settings_of(plan, [trace, *traces])
    for section, values in settings.sections.items():
        for name in values.keys() | other.sections[section].keys():
            one, two = values.get(name), other.sections[section].get(name)
            if one != two and f"{section}.{name}" not in FREE:
                raise _refusal(plan, traces, trace, choices, f"{section}.{name}", one, two)


def _refusal(
    plan: Plan, traces: list[Trace], trace: Trace, choices: dict[str, bool], name: str, one: Any, two: Any
) -> Refusal:
    known = {**traces[0]["decisions"], **trace["decisions"]}
    keys = choices or {key: True for key in _relevant(plan.program, trace, _statements_of_settings(plan))}
    decisions = [known[key] for key in keys if key in known]
    words = " and ".join(f"`{one['words'][:80]}`" for one in decisions[:2]) or "a condition"
    place = plan.program.position(decisions[0]["statement"]) if decisions else plan.key["trainer"]
    return Refusal(
        "R4",
        f"{name} depends on {words}, which is only known at run time ({one!r} or {two!r}); write the value that you"
        " want as a constant",
        plan.program.statements[place].cell,
    )


def _statements_of_settings(plan: Plan) -> set[int]:
    """The places of the statements that the settings depend on: those that load, adapt and train, and what they read,
    but the rows."""
    effects = plan.program.effects
    rows = {node.id for node in _names(plan.train_expression) | _names(plan.eval_expression)}
    needed = set(plan.key.values())
    wanted = {name for place in needed for name in effects[place].reads | effects[place].late} - rows
    while True:
        more = {
            place
            for place, effect in enumerate(effects)
            if place not in needed and wanted & (effect.binds | effect.may_bind | effect.changes)
        }
        if not more:
            return needed
        needed |= more
        wanted |= {name for place in more for name in effects[place].reads | effects[place].late}


def _names(node: Any) -> set[Any]:
    return {inner for inner in ast.walk(node) if isinstance(inner, ast.Name)} if node is not None else set()
