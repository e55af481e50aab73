"""Decide where each statement of a notebook goes: a function of the script, the settings, or nowhere, with a reason.

A statement is left out only if training does not depend on it and it is of a known harmless kind. A notebook with any
other statement is refused (R4).
"""

from __future__ import annotations

from finetune.convert.changes import refuse_late_changes, refuse_length_of_model, refuse_patches
from finetune.convert.harmless import drop_the_rest
from finetune.convert.hooks import (
    drop_early_saves,
    keep_dataset,
    keep_environment,
    keep_exports,
    keep_model,
    keep_tokenizer,
    keep_trainer,
    lift_shared_constants,
    note_defaults,
    note_settings,
    refuse_late_template,
    refuse_tokenizer_not_given,
)
from finetune.convert.modules import own_packages
from finetune.convert.names import Program
from finetune.convert.read import Notebook, Refusal
from finetune.convert.roles import Plan, find_key_statements, find_names_of_roles, find_scratch, read_trainer_call
from finetune.convert.shells import refuse_shells
from finetune.convert.trace import Trace


def make_plan(notebook: Notebook, program: Program, traces: list[Trace]) -> Plan:
    """Decide on every statement. Raises Refusal (R0, R2, R4)."""
    plan = Plan(program=program, trace=traces[0], own_modules=own_packages(notebook))
    find_key_statements(plan, traces[0])
    find_names_of_roles(plan)
    find_scratch(plan)
    refuse_patches(program, plan.key["train"])
    read_trainer_call(plan)
    refuse_late_changes(program, traces[0])
    refuse_length_of_model(program, traces[0])
    drop_early_saves(plan)
    keep_environment(plan, notebook)
    keep_tokenizer(plan)
    refuse_tokenizer_not_given(plan)
    keep_dataset(plan)
    keep_model(plan)
    keep_trainer(plan)
    refuse_late_template(plan)
    keep_exports(plan)
    note_settings(plan)
    lift_shared_constants(plan)
    drop_the_rest(plan, notebook)
    note_defaults(plan)
    refuse_shells(plan, notebook)
    _not_run(plan, traces)
    return plan


def _not_run(plan: Plan, traces: list[Trace]) -> None:
    """Refuse if a kept statement fails under the stubs, because it could not be compared."""
    for trace in traces:
        for key, why in trace["failed"].items():
            place = plan.program.position(int(key))
            disposition = plan.dispositions.get(place)
            statement = plan.program.statements[place]
            before = place < plan.key["train"]
            if why.startswith("endless") and before:
                raise Refusal(
                    "R4",
                    f"the statement does not finish under the recording stubs, so it cannot be verified ({why}):"
                    f" {statement.head[:80]}",
                    statement.cell,
                )
            if why.startswith("unsafe") and before and disposition is not None and disposition.what != "dropped":
                raise Refusal(
                    "R4",
                    f"the statement cannot run safely under the recording stubs ({why}): {statement.head[:80]}",
                    statement.cell,
                )
            if disposition is not None and (disposition.what == "kept" or (disposition.what == "settings" and before)):
                raise Refusal(
                    "R4",
                    f"the statement fails under the recording stubs, so it cannot be verified ({why}):"
                    f" {statement.head[:80]}",
                    statement.cell,
                )
