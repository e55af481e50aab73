"""From the command line and a YAML file to a Config, or to every mistake in them at once."""

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from finetune.config.schema import SECTIONS, Config, ConfigError, contradictions
from finetune.config.sft_fields import CHOICES, MANAGED, choices, sft_fields
from finetune.config.values import NotAllowed, convert, describe, members
from finetune.redact import MASK, is_secret_name, redact, redact_tree

# Names from other tools. They are suggested, not accepted: a file says what it means in one way.
_ALIASES = {
    "alpha": "lora.lora_alpha",
    "base_model": "model.model_name_or_path",
    "batch_size": "training.per_device_train_batch_size",
    "cutoff_len": "data.max_length",
    "data_path": "data.train_file",
    "dataset": "data.dataset_name",
    "dataset_path": "data.train_file",
    "epochs": "training.num_train_epochs",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_target_modules": "lora.target_modules",
    "lr": "training.learning_rate",
    "lr_scheduler": "training.lr_scheduler_type",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "micro_batch_size": "training.per_device_train_batch_size",
    "model_name": "model.model_name_or_path",
    "num_epochs": "training.num_train_epochs",
    "optimizer": "training.optim",
    "rank": "lora.r",
    "sample_packing": "data.packing",
    "seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "train_on_inputs": "data.assistant_only_loss",
    "val_set_size": "data.eval_fraction",
    "warmup_ratio": "training.warmup_steps",
}
_COMMAND_LINE = "command line"
_NULLS = ("~", "null", "Null", "NULL")


class _Loader(yaml.SafeLoader):
    """Safe YAML with three differences: `1e-5` is a number (YAML 1.1 wants `1.0e-5`), a date stays text, and a key
    that is given twice is remembered in `duplicates` as (line, key) instead of silently replacing the first."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self.duplicates: list[tuple[int, str]] = []

    def construct_document(self, node: yaml.Node) -> Any:
        if _expanded_nodes(node, {}) > _MOST_NODES:
            raise yaml.constructor.ConstructorError(
                None, None, f"its aliases expand to more than {_MOST_NODES:,} values", node.start_mark
            )
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    self.duplicates.append((key.start_mark.line + 1, key.value))
                elif isinstance(key, yaml.ScalarNode):
                    seen.add(key.value)
        return super().construct_mapping(node, deep)


_MOST_NODES = 100_000  # of a document with its aliases written out
# What PyYAML raises for a broken document; for some malformed scalars the error of Python itself.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, KeyError, AttributeError, TypeError)


def _expanded_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes below `node` with every alias written out: a few lines can stand for billions."""
    if id(node) not in known:
        known[id(node)] = 0  # an alias to what contains it
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_expanded_nodes(child, known) for child in children)
    return known[id(node)]


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read back as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


class Setting(NamedTuple):
    """One `section.key` as the user gave it. `raw` is its text on the command line, None for a file."""

    where: str
    section: str
    key: str
    value: Any
    raw: str | None = None

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    def __str__(self) -> str:
        value = self.value if self.raw is None else self.raw
        text = MASK if is_secret_name(self.key) and value not in ("", None) else _show(value)
        shown = f"{self.name}: {text}" if self.raw is None else f"--{self.name} {text}"
        return f"{self.where}: `{shown.rstrip()}`"


@dataclass
class _Problems:
    """The mistakes so far, and the names they are about: a rule between fields says nothing on a field that is already
    reported, or that a misspelt key was meant to set."""

    texts: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def add(self, text: str, *names: str | None) -> None:
        self.texts.append(redact(text))
        self.names.update(name for name in names if name)


def load(argv: list[str], *, verb: str = "train", script: str | None = None) -> Config:
    """The configuration of one invocation: command line over YAML over defaults.

    Grammar: `[--config F.yaml] [--section.key value | --section.key=value ...] [--dry-run] [--json PATH] [-h]`.
    Values are YAML; a key of type bool may stand alone for true; `-` and `_` are the same in a key; of a key that is
    repeated on the command line the last one counts. `-h` prints the help and ends the process with exit code 0, as
    argparse does. `--dry-run` is for the verb `train` alone.

    Args:
        script: file whose function makes the rows where the configuration names none.

    Raises:
        ConfigError: with every unknown key, wrong type, value out of range and contradiction in `problems`.
    """
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(help_text(verb))
        raise SystemExit(0)
    problems = _Problems()
    options, overrides = _read_command_line(argv, verb, problems)
    config_file = options.get("config")
    settings = [*(_read_yaml(config_file, problems) if config_file else ()), *overrides]

    values: dict[str, Any] = {}
    origin: dict[str, Setting] = {}
    for setting in settings:
        if (checked := _check(setting, problems)) is not None:
            values[setting.name], origin[setting.name] = checked[0], setting
    _drop_outranked_length(values, origin)
    if values.get("model.backend") == "transformers":  # the default "unsloth" is for the backend that has it
        values.setdefault("training.gradient_checkpointing", True)

    config = Config(
        **{section: _build(section, values) for section in SECTIONS},
        config_file=config_file,
        dry_run="dry_run" in options,
        json=_json_path(options, problems),
        script=script,
        given=frozenset(origin),
    )
    for names, because in contradictions(config, config.given):
        if problems.names.isdisjoint(names):
            given = "; ".join(str(origin[name]) for name in names if name in origin)
            problems.add(f"{given}: {because}")
    if problems.texts:
        raise ConfigError(problems.texts)
    return config


def _drop_outranked_length(values: dict[str, Any], origin: dict[str, Setting]) -> None:
    """max_steps and num_train_epochs say the same thing: the one on the command line outranks the other in the file."""
    for mine, other in (("max_steps", "num_train_epochs"), ("num_train_epochs", "max_steps")):
        mine, other = f"training.{mine}", f"training.{other}"
        on_command_line = mine in origin and origin[mine].raw is not None
        if on_command_line and values[mine] != -1 and other in origin and origin[other].raw is None:
            del values[other], origin[other]


def _json_path(options: dict[str, str], problems: _Problems) -> Path | None:
    """The file for the results. That it cannot be one is known now, not when the run ends."""
    if not options.get("json"):
        return None
    path = Path(options["json"])
    if path.is_dir():
        problems.add(f"{_COMMAND_LINE}: `--json {path}`: is a folder; give the name of a file", *_OWN)
    elif path.parent.exists() and not path.parent.is_dir():
        problems.add(f"{_COMMAND_LINE}: `--json {path}`: {path.parent} is a file; give a path in a folder", *_OWN)
    return path


def _build(section: str, values: dict[str, Any]) -> Any:
    """The section with the given values; what is no field of ours goes to its `extra`."""
    own: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith(f"{section}."):
            (own if name in _OWN else extra)[name.partition(".")[2]] = value
    return SECTIONS[section](**own, **({"extra": extra} if extra else {}))


# Reading ------------------------------------------------------------------------------------------------------------


def _read_command_line(argv: Sequence[str], verb: str, problems: _Problems) -> tuple[dict[str, str], list[Setting]]:
    """The options without a section (name -> text), and the settings."""
    options: dict[str, str] = {}
    settings: list[Setting] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        name, equals, text = token[2:].partition("=")
        name = name.replace("-", "_")
        if not token.startswith("--") or not name:
            problems.add(f"{_COMMAND_LINE}: `{token}`: is no option; --help lists them")
            continue
        if name == "dry_run":
            options[name] = "true"
            if equals or verb != "train":
                problems.add(f"{_COMMAND_LINE}: `{token}`: takes no value and belongs to finetune.train alone")
            continue
        has_value = bool(equals) or bool(rest and not rest[0].startswith("--"))
        if has_value and not equals:
            text = rest.pop(0)
        section, _, key = name.partition(".")
        if name in ("config", "json"):
            if not text:
                problems.add(f"{_COMMAND_LINE}: `--{name}`: a path must follow", *_OWN)
            elif name in options:
                problems.add(f"{_COMMAND_LINE}: `--{name} {text}`: --{name} is given twice; keep one", *_OWN)
            options[name] = text
        elif not key:
            option, nearest = _most_alike(section, ["config", "json", "dry_run"]), _nearest(section)
            text = (
                f"is no option; nearest is --{option.replace('_', '-')}" if option else _unknown("", section, nearest)
            )
            problems.add(f"{_COMMAND_LINE}: `{token}`: {text}", nearest)
        elif has_value:
            settings.append(Setting(_COMMAND_LINE, section, key, text, raw=text))
        elif bool in members(_annotation(section, key) or bool):  # a key that is not known is reported later on
            settings.append(Setting(_COMMAND_LINE, section, key, True, raw=""))
        else:
            allowed = describe(_annotation(section, key))
            problems.add(f"{_COMMAND_LINE}: `{token}`: a value must follow ({allowed})", f"{section}.{key}")
    return options, settings


def _read_yaml(path: str, problems: _Problems) -> list[Setting]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        problems.add(f"{path}: the configuration file does not exist (looked in {Path.cwd()})", *_OWN)
        return []
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        problems.add(f"{path}: cannot be read as UTF-8 text: {error}", *_OWN)
        return []
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        document = None if root is None else loader.construct_document(root)
    except _NOT_YAML as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or f"{error}".partition("\n")[0]
        if isinstance(error, KeyError | AttributeError | TypeError):
            what = "a value does not fit its tag"
        elif isinstance(error, RecursionError):
            what = "it is nested too deeply"
        problems.add(f"{path}{line}: is not valid YAML: {what}", *_OWN)
        return []
    for line, key in loader.duplicates:
        problems.add(f"{path}:{line}: `{key}` is given twice in the same mapping; keep one")
    if not isinstance(document, dict) or not document:
        problems.add(f"{path}: holds no settings; sections are {', '.join(SECTIONS)}", *_OWN)
        return []

    settings: list[Setting] = []
    section_nodes = _nodes(root)
    for section, content in document.items():
        line, content_node = section_nodes.get(str(section), (1, None))
        if section not in SECTIONS:
            # Its keys are not looked at, so no rule may say that one of them is missing.
            is_section = isinstance(content, dict)
            nearest = _most_alike(str(section), list(SECTIONS)) if is_section else _nearest(str(section))
            touched = [name for name in _OWN if nearest in (name, name.partition(".")[0])]
            problems.add(f"{path}:{line}: `{section}`: {_unknown('', str(section), nearest)}", *touched)
        elif isinstance(content, dict):
            key_nodes = _nodes(content_node)
            for key, value in content.items():
                key_line, _ = key_nodes.get(str(key), (line, None))
                settings.append(Setting(f"{path}:{key_line}", section, str(key), value))
        elif content is not None:  # a section with all its keys commented out is None
            names = [name for name in _OWN if name.startswith(f"{section}.")]
            problems.add(f"{path}:{line}: `{section}: {_show(content)}`: a section is a mapping of keys", *names)
    return settings


def _nodes(mapping: yaml.Node | None) -> dict[str, tuple[int, yaml.Node]]:
    """Key -> its line (from 1) and the node of its value."""
    pairs = mapping.value if isinstance(mapping, yaml.MappingNode) else ()
    return {str(key.value): (key.start_mark.line + 1, value) for key, value in pairs}


# Checking -----------------------------------------------------------------------------------------------------------


def _check(setting: Setting, problems: _Problems) -> tuple[Any] | None:
    """The value in a 1-tuple, or None where there is none to take: it is wrong and reported, or has no effect."""
    if setting.name == "training.report_to" and setting.value in ("tensorboard", ["tensorboard"]):
        return None  # what happens anyway
    annotation = _annotation(setting.section, setting.key)
    if annotation is None:
        nearest = _nearest(setting.key)
        problems.add(f"{setting}: {_unknown(setting.section, setting.key, nearest)}", setting.name, nearest)
        return None
    try:
        value = convert(_parse(setting.raw, annotation) if setting.raw else setting.value, annotation)
    except (NotAllowed, *_NOT_YAML):
        problems.add(f"{setting}: {_wrong_type(setting, annotation)}", setting.name)
        return None
    if why := _unusable(value):
        problems.add(f"{setting}: {why}", setting.name)
        return None
    words, test = (_OWN[setting.name].metadata["allowed"] if setting.name in _OWN else None) or ("", None)
    if test is not None and value is not None and not test(value):
        problems.add(f"{setting}: must be {words}", setting.name)
        return None
    if setting.section == "training" and setting.key in CHOICES and value != _DEFAULTS[setting.name]:
        known = choices(setting.key)
        if value not in known:
            near = _most_alike(str(value), known)
            problems.add(
                f"{setting}: {f'nearest is {near}; ' if near else ''}allowed are {', '.join(known)}", setting.name
            )
            return None
    return (value,)


def _wrong_type(setting: Setting, annotation: Any) -> str:
    """What is wrong with a value of the wrong type, with the usual slips by name: a number in quotes, or without."""
    value = setting.value.strip("\"' ") if isinstance(setting.value, str) else setting.value
    quoted = isinstance(value, str) and (setting.raw is None or setting.raw.lstrip()[:1] in ("'", '"'))
    if quoted and int in members(annotation) and re.fullmatch(r"[-+]?\d{1,20}", value):
        return f'expected an integer, got the string "{value}"; remove the quotes'
    hint = "; put it in quotes" if str in members(annotation) and isinstance(value, int | float) else ""
    return f"is not of the type {describe(annotation)}{hint}"


def _unusable(value: Any) -> str | None:
    """What no path, name or count can be, whatever its key; None for all other values."""
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and "\0" in text for text in texts):
        return "contains a NUL character; remove it"
    if type(value) is int and abs(value) >= 2**63:
        return "must be smaller than 2^63"
    return None


def _parse(raw: str, annotation: Any) -> Any:
    """The text of a command-line value as YAML. Where text is allowed, it stays as it is unless it is quoted, null, a
    list, a mapping or a bool that is allowed too: a prompt may hold `: ` or ` #`, a commit may look like a number."""
    if str not in members(annotation):
        return yaml.load(raw, _Loader)
    try:
        parsed = yaml.load(raw, _Loader)
        convert(parsed, annotation)
    except (NotAllowed, *_NOT_YAML):
        return raw
    quoted = isinstance(parsed, str) and raw.lstrip()[:1] in ("'", '"')
    is_null = parsed is None and raw.strip() in _NULLS
    return parsed if quoted or is_null or isinstance(parsed, bool | list | dict) else raw


def _annotation(section: str, key: str) -> Any:
    """The annotation of a key that may be given, None for any other."""
    if key in MANAGED:
        return None
    own = _OWN.get(f"{section}.{key}")
    if own is not None:
        return own.type
    if section == "training" and not any(name.endswith(f".{key}") for name in _OWN):  # those belong elsewhere
        return sft_fields().get(key)
    return None


def _unknown(section: str, key: str, nearest: str | None) -> str:
    """What is wrong with a key that cannot be given, and what to write instead."""
    if key in MANAGED:
        return f"cannot be set here; {MANAGED[key]}"
    what = f"no key of `{section}:`" if section in SECTIONS else f"no section; sections are {', '.join(SECTIONS)}"
    if nearest is None:
        return f"is {what}; --help lists every key"
    target, _, target_key = nearest.partition(".")
    if target_key == key:
        return f"is {what}; it belongs under `{target}:`"
    return f"is {what}; nearest is {nearest}" + (f" ({_summary(nearest)})" if target_key else "")


def _nearest(key: str) -> str | None:
    """The known name that was most likely meant: a name from another tool, or the most similar key of any section."""
    names = {name.split(".")[1]: name for name in _known_names()} | _ALIASES
    nearest = _most_alike(key, list(names))
    return names[nearest] if nearest else None


_CUTOFF = 0.6  # the default of difflib.get_close_matches


def _most_alike(given: str, known: Sequence[str]) -> str | None:
    near = max(known, key=lambda name: _alike(name, given))
    return near if _alike(near, given) >= _CUTOFF else None


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower().replace("-", "_"), other.lower().replace("-", "_")).ratio()


def _known_names() -> list[str]:
    """Ours first: of two names that are equally near, the first one is suggested."""
    return [*_OWN, *(f"training.{name}" for name in sft_fields() if _annotation("training", name) is not None)]


def _summary(name: str) -> str:
    section, _, key = name.partition(".")
    return describe(_annotation(section, key)) + (f", default {_show(_DEFAULTS[name])}" if name in _DEFAULTS else "")


def _show(value: Any) -> str:
    """A value as YAML would have it, on one line, cut if it is long; secrets are masked before the cut."""
    plain = {None: "null", True: "true", False: "false"}
    text = plain[value] if value is None or isinstance(value, bool) else redact(str(value))
    return textwrap.shorten(text, 80, placeholder=" ...")


def _own_fields() -> Iterator[tuple[str, Any]]:
    for section, kind in SECTIONS.items():
        yield from ((f"{section}.{item.name}", item) for item in fields(kind) if "help" in item.metadata)


_OWN: dict[str, Any] = dict(_own_fields())
_DEFAULTS = {
    name: item.default if item.default is not MISSING else item.default_factory() for name, item in _OWN.items()
}


# Writing ------------------------------------------------------------------------------------------------------------


def help_text(verb: str, script: str | None = None) -> str:
    """Usage, then every key by section with its type, default and meaning; for a script that trains, of that one."""
    train = verb == "train"
    target = script or f"-m finetune.{verb}"
    command = f"accelerate launch {target} [--dry-run]" if train else f"python {target}"
    lines = [
        f"usage: {command} [--config FILE.yaml] [--section.key VALUE ...] [--json PATH]",
        "",
        "  --config FILE.yaml   settings in the sections below; without a model the embedded demo runs",
        "  --section.key VALUE  one setting, over the file's; VALUE is YAML, such as 2e-4, true or '[q_proj, v_proj]'",
        *(["  --dry-run            the whole path on one device, measured; no output is kept"] if train else []),
        "  --json PATH          also write the machine-readable result",
    ]
    for section, kind in SECTIONS.items():
        lines += ["", f"{section}:  {(kind.__doc__ or '').splitlines()[0]}"]
        for name, item in _OWN.items():
            if name.startswith(f"{section}."):
                bounds = f", {item.metadata['allowed'][0]}" if item.metadata["allowed"] else ""
                lines.append(f"  --{name}  {describe(item.type)}{bounds}  (default: {_show(_DEFAULTS[name])})")
                lines.append(f"        {item.metadata['help']}")
    return "\n".join(lines) + "\n"


def dump_yaml(config: Config) -> str:
    """The resolved configuration as a file that `--config` reads back to the same one. Keys that would contradict it
    there are left out: the adapter's in full fine-tuning, and the epochs where max_steps counts."""
    resolved = config.to_dict()
    source = resolved.pop("config_file")
    resolved["training"] |= resolved["training"].pop("extra")
    if config.model.full_finetuning:
        del resolved["lora"]
    if config.training.max_steps > 0:
        del resolved["training"]["num_train_epochs"]
    resolved = redact_tree(resolved)
    header = f"# resolved from {source} and the command line\n" if source else ""
    return header + yaml.dump(resolved, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
