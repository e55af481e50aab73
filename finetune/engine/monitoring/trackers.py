"""Trackers that a run reports to beside TensorBoard: transformers' own callbacks for wandb, mlflow, trackio and others.

They get the figures that TensorBoard shows, from the same table (`runtime.tags`), under the names that TRL gives them:
train/loss, train/grad_norm, eval/loss. What TRL has no name for is under its name in the table: train/mfu. Figures of
single ranks are in TensorBoard and ranks.jsonl only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from finetune.engine.monitoring.callbacks import EVENTS
from finetune.errors import RunError, UserError, describe
from finetune.runtime.command import printable, warn
from finetune.runtime.ranks import distributed
from finetune.runtime.tags import METRICS
from finetune.runtime.types import JsonObject

# Usage statistics that the services' own libraries send, beside what they are asked to log.
_NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "DVC_NO_ANALYTICS": "1",
}
# Services whose callback in transformers 5 shows the trainer's keys as they are, `loss` and `eval_loss`. The others
# prefix them themselves.
_UNPREFIXED = frozenset(("azure_ml", "dagshub", "dvclive", "mlflow"))
# Our keys in the trainer's logs that a tracker gets under TRL's.
_RENAMED = frozenset(metric.name for metric in METRICS if metric.logged)


def tracker_callbacks(names: Sequence[str]) -> list[TrainerCallback]:
    """The trackers' callbacks, on rank 0; on other ranks there are none.

    Raises:
        RunError: a service's library cannot be used.
    """
    if not distributed.ranks().is_main:
        return []
    found = []
    for name in names:
        disable_telemetry()
        try:
            found.append(integration_utils.INTEGRATION_TO_CALLBACK[name]())
        except Exception as error:  # of a library of the service
            raise _unusable_error(name, error) from error
    return found


def disable_telemetry() -> None:
    """Switch the services' usage statistics off, unless the user has set the variables."""
    for variable, value in _NO_TELEMETRY.items():
        os.environ.setdefault(variable, value)


def wrap_trackers(given: Sequence[TrainerCallback], reported: dict[str, float]) -> list[Tracker]:
    """Take over the trackers among a trainer's callbacks: see `Tracker`.

    Args:
        reported: what the run's logger has computed for the record or evaluation that is being logged.
    """
    names = {kind: name for name, kind in integration_utils.INTEGRATION_TO_CALLBACK.items() if name != "tensorboard"}
    return [Tracker(names[type(one)], one, reported) for one in given if type(one) in names]


class Tracker:
    """Stands between a trainer and a tracker's callback, until `end`.

    A record or evaluation is completed with the figures of TensorBoard. The end of training is passed on by `end`: the
    evaluation after it is part of the run. A service that cannot be reached when the run begins ends it; one that
    fails later costs its figures, never the training.
    """

    def __init__(self, name: str, callback: TrainerCallback, reported: dict[str, float]) -> None:
        self.name, self.callback, self._reported = name, callback, reported
        self._begun = self._failed = False
        self._ending: tuple[tuple[object, ...], JsonObject] | None = None
        self._methods = {event: getattr(callback, event) for event in EVENTS}
        for event in EVENTS:
            setattr(callback, event, self._passing(event))

    def _passing(self, event: str) -> Callable[..., None]:
        def call(*args: object, **kwargs: Any) -> None:
            if event == "on_train_end":
                self._ending = (args, kwargs)
            elif event == "on_log":
                self._call(event, *args, **{**kwargs, "logs": self._completed(kwargs.get("logs") or {})})
            else:
                self._call(event, *args, **kwargs)

        return call

    def _completed(self, logs: JsonObject) -> JsonObject:
        """The trainer's logs with the figures of TensorBoard, if they are a record or an evaluation of the run. Their
        names get their `train/` or `eval/` here if the callback does not add it."""
        is_record = "loss" in logs or any(key in logs for key in self._reported)
        logs = {key: value for key, value in logs.items() if key not in _RENAMED}
        logs = logs | self._reported if is_record else logs
        return integration_utils.rewrite_logs(logs) if self.name in _UNPREFIXED else logs

    def _call(self, event: str, *args: object, **kwargs: object) -> None:
        if self._failed:
            return
        try:
            self._methods[event](*args, **kwargs)
            self._begun = self._begun or event in ("on_log", "on_train_begin")
        except UserError:
            raise
        except Exception as error:
            if not self._begun:
                raise _unusable_error(self.name, error) from error
            self._failed = True
            why = printable(" ".join(describe(error).split()))[:300]
            warn(f"{self.name} failed ({why}). The training continues without it; TensorBoard's files are complete.")

    def end(self) -> None:
        """Pass the end of training on, and let go of the callback."""
        for event in EVENTS:
            vars(self.callback).pop(event, None)
        if self._ending is not None:
            args, kwargs = self._ending
            self._call("on_train_end", *args, **kwargs)


def _unusable_error(name: str, error: Exception) -> RunError:
    text = " ".join(describe(error).split())[:300].rstrip(".")
    return RunError(
        f"logging.report_to: {name} cannot be used here: {text}. Log in, choose its offline mode (docs/tracking.md), "
        "or remove it."
    )
