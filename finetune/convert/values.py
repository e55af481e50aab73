"""A notebook's training arguments as its trace shows them: variables, `**settings` and arithmetic are resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.config.arguments import CONFIG, TRAINER, former, rows
from finetune.convert.notebook.read import Refusal
from finetune.convert.trace import Trace, event_of


class Unknown:
    """A value that is only known at run time."""

    def __init__(self, item: dict[str, Any]):
        self.item = item
        self.name = str(item.get("name") or "")

    def __str__(self) -> str:
        return str(self.item.get("sym") or self.item.get("text") or self.item.get("other") or self.item)

    __repr__ = __str__


def known(value: Any) -> Any:
    """A traced value in Python, with Unknown for symbols."""
    if isinstance(value, list):
        return [known(item) for item in value]
    if isinstance(value, dict):
        if "dict" in value and len(value) == 1:
            return {known(key) if not isinstance(key, dict) else str(key): known(item) for key, item in value["dict"]}
        if "tuple" in value and len(value) == 1:
            return tuple(known(item) for item in value["tuple"])
        if "set" in value and len(value) == 1:
            return [known(item) for item in value["set"]]
        return Unknown(value)
    return value


@dataclass(frozen=True, kw_only=True)
class Described:
    """The arguments of a trainer and of its configuration, by their names today."""

    trainer: dict[str, Any]
    config: dict[str, Any]


def described(trace: Trace) -> Described:
    """The arguments of the trainer that trains.

    Raises:
        Refusal: R4, the trainer's configuration is not known.
    """
    event = event_of(trace, "trainer")
    assert event is not None
    trainer = _with_todays_names(TRAINER, known(event["detail"]))
    config = _config(trainer.get("args"))
    moved = {key: trainer.pop(key) for key, row in rows(TRAINER).items() if row.moved and key in trainer}
    moved = _with_todays_names(CONFIG, moved)
    config |= {key: value for key, value in moved.items() if value is not None and config.get(key) is None}
    return Described(trainer=trainer, config=config)


def _config(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Unknown) or "kwargs" not in given.item:
        raise Refusal("R4", f"the trainer's arguments are only known at run time ({given}); use an SFTConfig")
    kwargs, args = known(given.item["kwargs"]), known(given.item["args"])
    if args:
        kwargs["output_dir"] = args[0]
    return _with_todays_names(CONFIG, kwargs)


def _with_todays_names(owner: str, given: dict[Any, Any]) -> dict[str, Any]:
    """The arguments under the names they have now. If the notebook gives both names, today's wins, unless it is unset:
    `warmup_steps=0` beside a `warmup_ratio`."""
    new = {name: now for name, now in former(owner).items() if now}
    old = {new[str(key)]: value for key, value in given.items() if str(key) in new}
    today = {str(key): value for key, value in given.items() if str(key) not in new}
    return old | {key: value for key, value in today.items() if key not in old or value not in (None, 0)}
