"""Turns conversations into token ids as in training, and generates answers that end where a turn ends."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import set_seed

from finetune.chat.load import LoadedModel
from finetune.data.templates import render
from finetune.data.templates.chat_templates import load_template
from finetune.data.templates.spans import end_of_turn
from finetune.engine.checkpoint.run_artifacts import TrainedModel
from finetune.engine.model import generation_config
from finetune.engine.model.generation import complete, end_tokens
from finetune.errors import RunError, UserError, cut
from finetune.runtime.types import JsonObject, Model

Messages = list[dict[str, str]]
REMEDY = "--max-new-tokens allows more, and --temperature 0.7 may end repetition"  # of a cut answer


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model said.

    tokens:    generated, the end token included
    finished:  False if it came to no end within the tokens that it was given
    """

    text: str
    tokens: int
    finished: bool


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How to generate.

    temperature:  None leaves it to the model's generation config, or to `greedy`
    greedy:       what None means: the most likely token, for answers that can be repeated
    """

    max_new_tokens: int
    temperature: float | None
    greedy: bool
    seed: int


class Generator:
    """A loaded model with its chat template, stop tokens and way to generate."""

    def __init__(
        self,
        loaded: LoadedModel,
        found: TrainedModel,
        settings: GenerationSettings,
        *,
        system: str | None,
        raw: bool | None,
    ) -> None:
        """
        Args:
            system: the system message; None takes the run's own, an empty text none.
            raw: send texts without the chat template; None does as in training.

        Raises:
            UserError: the chat template is invalid, or cannot express the system message.
        """
        self.loaded, self.found, self.settings = loaded, found, settings
        tokenizer = loaded.tokenizer
        self.as_trained = raw is None
        untemplated = found.templated is False if raw is None else raw
        self.template = None if untemplated else load_template(tokenizer)
        self.system = found.setting("data.system_prompt", str) if system is None else system
        if self.template is None:
            if system:
                if untemplated and raw is None:
                    raise UserError(
                        f"--system needs a chat template, and {found.folder} was trained without one. Remove it, or "
                        "add --template."
                    )
                raise UserError(f"--system needs a chat template, and {found.folder} has none. Remove it.")
            self.system = None
        kwargs = found.setting("data.chat_template_kwargs", dict) or {}
        self._variables = {**tokenizer.special_tokens_map, **{str(name): value for name, value in kwargs.items()}}
        for name in ("messages", "tools", "documents", "add_generation_prompt", "template", "marks"):
            self._variables.pop(name, None)  # run.json may come from a stranger
        self.stops, self.stop_string = self._stops()
        set_seed(settings.seed)
        text = loaded.model.config.get_text_config()
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        if self.template is not None:
            self.encode(self.opening("Hello"))  # a template that cannot be rendered is reported before the first prompt

    # --- prompts ------------------------------------------------------------------------------------------------------

    def opening(self, text: str) -> Messages:
        """A conversation that begins with `text`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text}]

    def encode(self, messages: Messages) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks; without a chat template, of the last message
        alone.

        Raises:
            UserError: the chat template fails on it.
        """
        tokenizer = self.loaded.tokenizer
        if self.template is None:
            text, bos = messages[-1]["content"], tokenizer.bos_token
            ids = tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"]
            return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids  # an end before the answer
        try:
            text, _ = render.render(self.template, messages, add_generation_prompt=True, **self._variables)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            system = " It may have no system message: give --system ''." if self.system else ""
            why = " ".join(str(error).split())[:200]
            raise UserError(f"the chat template of {self.found.folder} fails: {why}.{system}") from None
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def _stops(self) -> tuple[list[int], str | None]:
        """Tokens that end an answer: of the generation configs of model and run, of the tokenizer, and the one that
        ends a turn in the chat template. If the tokenizer has no token for that, its text."""
        tokenizer = self.loaded.tokenizer
        stops = {*end_tokens(self.loaded.model, tokenizer), *generation_config.end_tokens_in_file(self.found.folder)}
        ending = end_of_turn(tokenizer, self.template, self._variables) if self.template is not None else None
        if ending is None:
            return sorted(stops), None
        first = generation_config.first_added_token(tokenizer, ending)
        return (sorted(stops), ending) if first is None else (sorted({*stops, first}), None)

    # --- answers ------------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> bool:
        """Whether answers are drawn at random."""
        if self.settings.temperature is not None:
            return self.settings.temperature > 0
        return not self.settings.greedy and bool(self.loaded.model.generation_config.do_sample)

    @property
    def description(self) -> str:
        """How answers are generated, in words."""
        config = self.generation_config(1)
        drawn = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        drawn = {name: value for name, value in drawn.items() if value is not None}
        how = ", ".join(f"{name} {value:g}" for name, value in drawn.items())
        settings = f"Sampling{': ' + how if how else ''}, seed {self.settings.seed}" if self.samples else "Greedy"
        names = [self.loaded.tokenizer.decode([token]) for token in self.stops]
        ends = ", ".join([*names, *([self.stop_string] if self.stop_string else [])])
        trained = self.as_trained and self.found.templated is False
        plain = f"no chat template{', as in training' if trained else ''}: each prompt is continued as it is"
        shape = plain if self.template is None else "chat template"
        system = f"system message {cut(self.system, 60)!r}; " if self.system else ""
        return f"{settings}; {shape}; {system}an answer ends at {ends or 'the length limit'}"

    def facts(self) -> JsonObject:
        """What the answers depend on, for --json."""
        config = self.generation_config(self.settings.max_new_tokens)
        drawn = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")} if self.samples else {}
        return {
            "folder": str(self.found.folder),
            "kind": "model" if self.found.adapter is None else "adapter",
            "base": self.found.base,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "system": self.system,
            "chat_template": self.template is not None,
            "stop_tokens": self.stops,
            "stop_string": self.stop_string,
            "sampling": {"seed": self.settings.seed, **drawn} if self.samples else None,
            "max_new_tokens": self.settings.max_new_tokens,
        }

    def generation_config(self, max_new_tokens: int) -> Any:
        """The GenerationConfig: the model's own, with the stop tokens and the settings of this program."""
        config = copy.deepcopy(self.loaded.model.generation_config)
        config.max_new_tokens, config.max_length = max_new_tokens, None
        config.min_length, config.min_new_tokens = 0, None
        config.num_beams, config.num_return_sequences, config.use_cache = 1, 1, True
        config.return_dict_in_generate = config.output_scores = config.output_logits = False
        config.eos_token_id, config.pad_token_id = self.stops, self.loaded.tokenizer.pad_token_id
        config.stop_strings = [self.stop_string] if self.stop_string else None
        config.do_sample = self.samples
        if not self.samples:
            for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
                setattr(config, name, None)
        elif self.settings.temperature is not None:
            config.temperature = self.settings.temperature
        return config

    def answer_limit(self, ids: Sequence[int]) -> int:
        """Tokens that an answer to a prompt may have: the model's context also limits it.

        Raises:
            UserError: the prompt fills the context.
        """
        if self.context is None:
            return self.settings.max_new_tokens
        if len(ids) >= self.context:
            raise UserError(
                f"the prompt is too long: {len(ids):,} tokens, and the model's context has {self.context:,}. "
                "Shorten it."
            )
        return min(self.settings.max_new_tokens, self.context - len(ids))

    def answer(self, prompts: Sequence[list[int]], *, base: bool = False, streamer: Any = None) -> list[Answer]:
        """Answers to tokenized prompts, generated together.

        Args:
            base: of the base model.
            streamer: transformers' streamer, for a single prompt.

        Raises:
            UserError: a prompt fills the model's context.
            RunError: the GPU has too little memory.
        """
        limit = min(self.answer_limit(ids) for ids in prompts)
        if len(prompts) > 1 and limit < self.settings.max_new_tokens:  # alone, each has the room that its prompt leaves
            return [one for ids in prompts for one in self.answer([ids], base=base)]
        settings, tokenizer = self.generation_config(limit), self.loaded.tokenizer
        further = {"streamer": streamer} if streamer is not None else {}
        if self.stop_string:
            further["tokenizer"] = tokenizer
        try:
            if base:
                with self.loaded.as_base() as model:
                    found = _generated(model, prompts, settings, further)
            else:
                found = _generated(self.loaded.model, prompts, settings, further)
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(
                f"CUDA ran out of memory: {len(prompts)} prompts were answered together. Lower --batch-size or "
                "--max-new-tokens."
            ) from error
        return [self._answer(ids) for ids in found]

    def _answer(self, ids: list[int]) -> Answer:
        text = self.loaded.tokenizer.decode(ids, skip_special_tokens=True)
        finished = bool(ids) and ids[-1] in self.stops
        if self.stop_string and self.stop_string in text:
            text, finished = text.partition(self.stop_string)[0], True
        return Answer(text=text, tokens=len(ids), finished=finished)


def _generated(model: Model, prompts: Sequence[list[int]], settings: Any, further: JsonObject) -> list[list[int]]:
    """`complete`, with the model's own defaults out of the way: transformers fills what `settings` leaves open."""
    own = model.generation_config
    model.generation_config = settings
    try:
        return complete(model, prompts, settings, **further)
    finally:
        model.generation_config = own
