"""Tokenizes the trainer's datasets, once per machine, by TRL's rules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from finetune.config import Config
from finetune.config.schema import DataConfig, TrainingConfig
from finetune.data.mixture import Source
from finetune.data.prepare import Data, prepare_splits
from finetune.data.store import Rows
from finetune.drop_in import refusals, rows, settings
from finetune.drop_in.former import RowReader
from finetune.runtime.types import Tokenizer

if TYPE_CHECKING:
    import trl


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How a trainer reads rows. Call it with datasets by split: "train", "eval" or "eval_NAME".

    args:            the user's SFTConfig
    tokenizer:       with its final chat template and special tokens
    reading:         which text of a row is read
    collator:        computes the labels of each tokenized row; None takes those of TRL's rules
    """

    args: trl.SFTConfig
    tokenizer: Any
    reading: RowReader
    collator: rows.Collator | None

    @property
    def data_config(self) -> DataConfig:
        return settings.data_config(self.args)

    def __call__(self, datasets: Mapping[str, object]) -> Data:
        """The tokenized rows of each split.

        Raises:
            Refused: rows that this trainer cannot use.
            UserError: the ranks were given different rows, or no row has a supervised token.
        """
        return self.tokenized(rows.sources(datasets, self.args, self.reading))

    def tokenized(self, sources: Mapping[str, Source]) -> Data:
        """The documents of each split's source, with the labels of the user's collator if there is one."""
        data, length, collator = self._prepared(sources), self.args.max_length, self.collator
        if self.args.packing and self.args.packing_strategy == "wrapped" and length is not None:
            return self._regroup(data, lambda found, *about: rows.wrapped_source(found, length, *about))
        if collator is not None:
            return self._regroup(data, lambda found, *about: rows.labeled_source(found.dataset, collator, *about))
        return data

    def _regroup(self, data: Data, source: Callable[[Rows, str, object], Source]) -> Data:
        """The documents that are made of prepared ones: `source` takes those of a split, its name and its identity."""
        found = {
            split: source(
                one, refusals.argument_name(split), [data.order_key if split == "train" else data.fingerprint, split]
            )
            for split, one in data.splits.items()
        }
        return replace(self._prepared(found), format=data.format)

    def _prepared(self, sources: Mapping[str, Source]) -> Data:
        config = Config(data=self.data_config, training=TrainingConfig(seed=self.args.seed))
        return prepare_splits(config, self._training_tokenizer(), {split: [one] for split, one in sources.items()})

    def _training_tokenizer(self) -> Tokenizer:
        """The tokenizer with the chat template that renders the rows. For `assistant_only_loss`, TRL replaces a
        template that it knows by a training template, which marks the assistant's turns. The turns of any other
        template are inferred."""
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers

        template = self.tokenizer.chat_template
        if not self.args.assistant_only_loss or not template or has_generation_markers(template):
            return self.tokenizer
        try:
            template = get_training_chat_template(self.tokenizer)
        except ValueError:  # TRL does not know it
            return self.tokenizer
        tokenizer = copy.copy(self.tokenizer)  # the saved model keeps its own template
        tokenizer.chat_template = template
        return tokenizer
