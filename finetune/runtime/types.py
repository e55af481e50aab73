"""Types of the objects that the libraries hand over, for annotations: transformers, PEFT and TRL are imported late, and
Unsloth replaces their classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON or YAML, a row, or keyword arguments that a library checks."""


class Stored:
    """A dataclass of plain values that ranks give each other through their store."""

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


class OnFailure(Protocol):
    """Records a failure of another rank, just before this process exits."""

    def __call__(self, message: str, *, in_place_of_main: bool = ...) -> None: ...


class RankStore(Protocol):
    """A store of torch, which the ranks of a run share: `TCPStore`, or a `PrefixStore` in one."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, value: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


if TYPE_CHECKING:

    class Tokenizer(PreTrainedTokenizerBase):
        """`transformers.PreTrainedTokenizerBase`, or Unsloth's wrapped one."""

        chat_template: str | None
        backend_tokenizer: tokenizers.Tokenizer
        bos_token: Any
        eos_token: Any
        pad_token: Any
        bos_token_id: Any
        eos_token_id: Any
        pad_token_id: Any
        decode: Callable[..., str]
        batch_decode: Callable[..., list[str]]
        convert_ids_to_tokens: Callable[..., Any]
        added_tokens_decoder: Any
        special_tokens_map: Any

    class Model(PreTrainedModel):
        """A causal language model of transformers, a `peft.PeftModel` around one, or either sharded by FSDP2."""

        forward: Any
        generation_config: Any
        get_input_embeddings: Any
        get_output_embeddings: Any
        generate: Any
        get_base_model: Any  # of PEFT's
        for_inference: Any  # of Unsloth's
        for_training: Any  # of Unsloth's
else:
    Tokenizer = Model = Any


class ScriptTrainer(Protocol):
    """`finetune.SFTTrainer` as the commands that are given a script see it."""

    job: Any

    def take_launch_batch(self, gpus: int) -> int: ...
    def build_trial(self, job: Any, folder: Path) -> Any: ...
    def train_for_parity(self, folder: Path, steps: int, most: int) -> None: ...
