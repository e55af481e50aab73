"""Types of the objects that the libraries hand over, by the members that this package uses.

transformers, PEFT and TRL are imported late, and Unsloth replaces their classes: a function gets a tokenizer, a model
or a trainer by what it can do, not by its class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedModel

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


class Tokenizer(Protocol):
    """`transformers.PreTrainedTokenizerBase`, or Unsloth's wrapped one."""

    name_or_path: str
    chat_template: str | None
    padding_side: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    SPECIAL_TOKENS_ATTRIBUTES: list[str]

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, tokenizers.AddedToken]: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    def __len__(self) -> int: ...
    def __call__(self, text: str | Sequence[str], **options: object) -> Mapping[str, Any]: ...
    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, **options: object) -> list[int]: ...
    def decode(self, token_ids: Sequence[int] | int, **options: object) -> str: ...
    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: object) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...
    def add_special_tokens(self, special_tokens_dict: Mapping[str, Any]) -> int: ...
    def save_pretrained(self, save_directory: str | Path) -> object: ...


if TYPE_CHECKING:

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
    Model = Any


class ScriptTrainer(Protocol):
    """`finetune.SFTTrainer` as the commands that are given a script see it."""

    job: Any

    def take_launch_batch(self, gpus: int) -> int: ...
    def build_trial(self, job: Any, folder: Path) -> Any: ...
    def train_for_parity(self, folder: Path, steps: int, most: int) -> None: ...
