"""Turns the command line and a YAML file into a Config, or reports all mistakes in them at once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from finetune.config import arguments
from finetune.config.rules import contradictions
from finetune.config.schema import DEFAULTS, KEYS, SECTIONS, Config, ConfigError
from finetune.config.sft_fields import CHOICES, choices, sft_fields
from finetune.config.values import NotAllowed, Values, convert, describe, in_words, members, show
from finetune.errors import cut
from finetune.redact import MASK, is_secret_name, redact, redact_tree

_COMMAND_LINE = "command line"
FINETUNE = "--finetune"
_NULLS = ("~", "null", "Null", "NULL")


class _Loader(yaml.SafeLoader):
    """Safe YAML with three differences: `1e-5` is a number (YAML 1.1 expects `1.0e-5`), a date stays a string, and a
    repeated key is recorded in `duplicates` as (line, key) instead of silently replacing the first."""

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

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Python cannot print an integer of thousands of digits, which YAML can give in hexadecimal."""
        value = super().construct_yaml_int(node)
        if value.bit_length() > _MOST_BITS:
            raise yaml.constructor.ConstructorError(None, None, "an integer is too large", node.start_mark)
        return value


_MOST_NODES = 100_000  # of a document with its aliases written out
_MOST_BITS = 10_000  # of an integer
# What PyYAML raises for a broken document; for some malformed scalars the error of Python itself.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, LookupError, ArithmeticError, AttributeError, TypeError)


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
    """Quotes strings that `_Loader` would not read back as strings."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


class Setting(NamedTuple):
    """One `section.key` as the user gave it. `raw` is its text on the command line, None in a file."""

    where: str
    section: str
    key: str
    value: object
    raw: str | None = None
    written: str = ""  # the former name that the user gave

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    def __str__(self) -> str:
        value = self.value if self.raw is None else self.raw
        text = MASK if is_secret_name(self.key) and value not in ("", None) else show(value)
        name = cut(self.written or self.name)
        shown = f"{name}: {text}" if self.raw is None else f"--{name} {text}"
        if self.where == FINETUNE:
            return f"{FINETUNE} {name}={text}"
        return f"{self.where}: `{shown.rstrip()}`"


@dataclass
class _Problems:
    """The mistakes so far, and the names they are about: a rule between fields is skipped if one of them is already
    reported, or is what a misspelled key was meant to set."""

    texts: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def add(self, text: str, *names: str | None) -> None:
        self.texts.append(redact(text))
        self.names.update(name for name in names if name)


def load(argv: list[str], *, command: str = "train") -> Config:
    """The configuration of one invocation: command line over YAML over defaults.

    Grammar: `[[--config] F.yaml] [--section.key value | --section.key=value ...] [--demo] [--dry-run] [--json PATH]`.
    Values are YAML. A key of type bool may stand alone for true, and `-` and `_` are the same in a key. If a key is
    repeated on the command line, the last one counts. `--dry-run` is for the command `train` alone.

    Args:
        command: the command that is run; only `train` accepts --dry-run.

    Raises:
        ConfigError: with every unknown key, wrong type, value out of range and contradiction in `problems`.
    """
    problems = _Problems()
    plain, overrides = _read_command_line(argv, command, problems)
    config_file = plain.get("config")
    settings = [*(_read_yaml(config_file, problems) if config_file else ()), *overrides]

    values: Values = {}
    origin: dict[str, Setting] = {}
    taken: dict[str, Setting] = {}
    notes: list[str] = []
    for setting in settings:
        if (setting := _by_todays_name(setting, notes)) is None:
            continue
        if setting.section == "training" and setting.key in arguments.TAKEN:
            taken[setting.name] = setting
            if (now := arguments.row(setting.key).now) is not None:
                notes.append(f"{setting}: this is training.{now} now.")
        elif (checked := _check(setting, problems)) is not None:
            values[setting.name], origin[setting.name] = checked[0], setting
    _drop_outranked_length(values, origin)
    for setting in taken.values():
        _take_over(setting, values, origin, problems)
    for setting in taken.values():
        _compare(setting, values, origin, problems)
    if values.get("model.backend") == "transformers":  # the default, "unsloth", exists in the unsloth backend only
        values.setdefault("training.gradient_checkpointing", True)

    config = Config(
        **{section: _build(section, values) for section in SECTIONS},
        config_file=config_file,
        demo="demo" in plain,
        dry_run="dry_run" in plain,
        json=Path(plain["json"]) if plain.get("json") else None,
        given=frozenset(origin),
        notes=tuple(dict.fromkeys(notes)),
    )
    for about, text in contradictions(config, config.given):
        if problems.names.isdisjoint(about):
            given = "; ".join(str(origin[name]) for name in about if name in origin)
            problems.add(f"{given}: {text}")
    if problems.texts:
        raise ConfigError(problems.texts)
    return config


def overrides(pairs: Sequence[str]) -> tuple[Values, list[str]]:
    """The values of `section.key=value`, as a script is given them with --finetune, and notes on former names.

    Raises:
        ConfigError: with all that a script cannot be given.
    """
    problems, notes, values = _Problems(), [], {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        section, _, key = name.replace("-", "_").partition(".")
        setting = _by_todays_name(Setting(FINETUNE, section, key, text, raw=text), notes)
        if setting is None:
            continue
        if section and not key:
            problems.add(f"{FINETUNE} `{pair}`: {_unknown('', section, _nearest(section))}")
        elif not text:
            problems.add(f"{FINETUNE} `{pair}`: expected section.key=value, such as training.learning_rate=1e-4.")
        elif _annotation(setting.section, setting.key) is not None and (
            why := arguments.why_not_in_script(setting.name)
        ):
            problems.add(f"{FINETUNE} {setting.name}: {why}.")
        elif (checked := _check(setting, problems)) is not None:
            values[setting.name] = checked[0]
    if values.get("training.strategy") in ("auto", "single"):
        problems.add(
            f"{FINETUNE} training.strategy={values['training.strategy']}: the number of processes is that of the "
            "launch. Set ddp or shard; `finetune advise SCRIPT` measures which, on how many GPUs."
        )
    if problems.texts:
        raise ConfigError(problems.texts)
    return values, notes


def _by_todays_name(setting: Setting, notes: list[str]) -> Setting | None:
    """A setting by a former name of SFTConfig, under the name that it has now; None if it has no effect today."""
    now = arguments.former_names().get(setting.key)
    if now is None or setting.name in KEYS or setting.section not in SECTIONS or setting.key in arguments.REFUSED:
        return setting
    if not now:
        notes.append(f"{setting}: {arguments.row(setting.key).left_out}, so it is left out.")
        return None
    section = _todays_name(now).partition(".")[0]
    notes.append(f"{setting}: this is {section}.{now} now.")
    return setting._replace(section=section, key=now, written=setting.name)


def _todays_name(argument: str) -> str:
    """The key that a name of SFTConfig is."""
    return next((name for name in KEYS if name.endswith(f".{argument}")), f"training.{argument}")


def _drop_outranked_length(values: Values, origin: dict[str, Setting]) -> None:
    """max_steps and num_train_epochs both set the length: one on the command line outranks the other in the file."""
    for mine, other in (("max_steps", "num_train_epochs"), ("num_train_epochs", "max_steps")):
        mine, other = f"training.{mine}", f"training.{other}"
        on_command_line = mine in origin and origin[mine].raw is not None
        if on_command_line and values[mine] != -1 and other in origin and origin[other].raw is None:
            del values[other], origin[other]


def _take_over(setting: Setting, values: Values, origin: dict[str, Setting], problems: _Problems) -> None:
    """Set our key for a name of SFTConfig that means the same. One on the command line outranks one in the file."""
    value = _value_of(setting)
    found = arguments.key_set_by(setting.key, value)
    if found is None:
        kept = arguments.row(setting.key).is_kept(value) or arguments.key_excluded_by(setting.key, value) is not None
        if not kept:
            problems.add(f"{setting}: {_why_not_accepted(setting.key)}", setting.name)
        return
    target, ours = found
    section, _, key = target.partition(".")
    if _check(Setting(setting.where, section, key, ours), problems, shown=setting) is None:
        problems.names.add(setting.name)
        return
    other = origin.get(target)
    if other is not None and isinstance(ours, dict):  # one column of several
        conflict = any(values[target].get(role, column) != column for role, column in ours.items())
        ours = values[target] | ours if not conflict or _outranks(setting, other) else ours
    else:
        conflict = other is not None and values[target] != ours
    if other is not None and conflict and not _outranks(setting, other):
        if not _outranks(other, setting):
            problems.add(f"{other}; {setting}: these contradict each other. Keep one.", target, setting.name)
        return
    values[target], origin[target] = ours, setting


def _why_not_accepted(key: str) -> str:
    """What is wrong with a value under a name of SFTConfig of which only some values are taken, and what to do."""
    instead, taken = arguments.REFUSED[key], arguments.values(key)
    if taken is None:
        return f"cannot be set here: {instead}."
    said = [one for one in taken if one not in ("", [], {}) and not (one is False and "no" in taken)]
    allowed = " or ".join(show(one) for n, one in enumerate(said) if one not in said[:n])
    why = f": {instead}" if arguments.row(key).reason else f". {instead[0].upper()}{instead[1:]}"
    return f"must be {allowed} here{why}."


def _compare(setting: Setting, values: Values, origin: dict[str, Setting], problems: _Problems) -> None:
    """Report a name of SFTConfig whose value excludes what our key is set to."""
    found = arguments.key_excluded_by(setting.key, _value_of(setting))
    if found is None:
        return
    target, excluded = found
    other = origin.get(target)
    if values.get(target, DEFAULTS[target]) != excluded or other is not None and _outranks(other, setting):
        return
    if other is None:
        example = f", such as {target}: {arguments.EXAMPLES[target]}" if target in arguments.EXAMPLES else ""
        text = f"{setting}: {target} is {show(excluded)} by default. Set {target}{example}."
    else:
        text = f"{other}; {setting}: these contradict each other. Keep one."
    problems.add(text, target, setting.name)


def _outranks(one: Setting, other: Setting) -> bool:
    """Whether `one` is on the command line and `other` is in the file."""
    return one.raw is not None and other.raw is None


def _value_of(setting: Setting) -> Any:
    """The value of a setting, parsed if it is text of the command line; text that is not YAML stays as it is."""
    if not setting.raw:
        return setting.value
    try:
        return yaml.load(setting.raw, _Loader)
    except _NOT_YAML:
        return setting.raw


def _build(section: str, values: Values) -> Any:
    """The section with the given values; what is no field of ours goes to its `extra`."""
    own: Values = {}
    extra: Values = {}
    for name, value in values.items():
        if name.startswith(f"{section}."):
            (own if name in KEYS else extra)[name.partition(".")[2]] = value
    return SECTIONS[section](**own, **({"extra": extra} if extra else {}))


# Reading ------------------------------------------------------------------------------------------------------------


def _read_command_line(argv: Sequence[str], command: str, problems: _Problems) -> tuple[dict[str, str], list[Setting]]:
    """The options without a section (name -> text), and the settings."""
    options: dict[str, str] = {}
    settings: list[Setting] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token.endswith((".yaml", ".yml")) and not token.startswith("--"):
            token = f"--config={token}"
        name, equals, text = token[2:].partition("=")
        name = name.replace("-", "_")
        if not token.startswith("--") or not name:
            if token.endswith(".py"):
                name = cut(token)
                text = f"not an option. To train with a script, launch it (accelerate launch {name}); `finetune dryrun"
                problems.add(f"{_COMMAND_LINE}: `{name}`: {text} {name}` measures it.", *KEYS)
            else:
                problems.add(f"{_COMMAND_LINE}: `{cut(token)}`: not an option. See --help.")
            continue
        if name in ("demo", "dry_run"):
            options[name] = "true"
            if equals or (name == "dry_run" and command != "train"):
                what = "it takes no value. Remove it." if equals else "only `train` has --dry-run. Remove it."
                problems.add(f"{_COMMAND_LINE}: `{cut(token)}`: {what}")
            continue
        has_value = bool(equals) or bool(rest and not rest[0].startswith("--"))
        if has_value and not equals:
            text = rest.pop(0)
        section, _, key = name.partition(".")
        if name in ("config", "json"):
            if not text:
                problems.add(f"{_COMMAND_LINE}: `--{name}`: expected a path after it.", *KEYS)
            elif name in options:
                problems.add(f"{_COMMAND_LINE}: `--{name} {text}`: --{name} is given twice. Keep one.", *KEYS)
            options[name] = text
        elif not key:
            known = ["--config", "--demo", "--json", *(["--dry-run"] if command == "train" else [])]
            option, nearest = _closest(token.partition("=")[0], known), _nearest(section)
            text = f"unknown option. Nearest is {option}." if option else _unknown("", section, nearest)
            problems.add(f"{_COMMAND_LINE}: `{cut(token)}`: {text}", nearest)
        elif has_value:
            settings.append(Setting(_COMMAND_LINE, section, key, text, raw=text))
        elif bool in members(_annotation(section, key) or bool):  # a key that is not known is reported later on
            settings.append(Setting(_COMMAND_LINE, section, key, True, raw=""))
        else:
            expected = in_words(_annotation(section, key))
            problems.add(f"{_COMMAND_LINE}: `{cut(token)}`: expected a value after it: {expected}.", f"{section}.{key}")
    return options, settings


def _read_yaml(path: str, problems: _Problems) -> list[Setting]:
    try:
        file = Path(path)
        if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe or a device, which may never end
            problems.add(f"{path}: it is not a regular file. Give a YAML file.", *KEYS)
            return []
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        problems.add(f"{path}: the configuration file does not exist (searched in {Path.cwd()}).", *KEYS)
        return []
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        problems.add(f"{path}: the file cannot be read as UTF-8 text: {error}.", *KEYS)
        return []
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        document = None if root is None else loader.construct_document(root)
    except _NOT_YAML as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or f"{error}".partition("\n")[0]
        if isinstance(error, LookupError | ArithmeticError | AttributeError | TypeError):
            what = "a value does not fit its tag"
        elif isinstance(error, RecursionError):
            what = "it is nested too deeply"
        problems.add(f"{path}{line}: not valid YAML: {what}.", *KEYS)
        return []
    for line, key in loader.duplicates:
        problems.add(f"{path}:{line}: `{cut(key)}` is given twice in the same mapping. Keep one.")
    if not isinstance(document, dict) or not document:
        problems.add(f"{path}: the file has no settings. Its sections are {', '.join(SECTIONS)}.", *KEYS)
        return []

    settings: list[Setting] = []
    section_nodes = _nodes(root)
    for section, content in document.items():
        line, content_node = section_nodes.get(str(section), (1, None))
        if section not in SECTIONS:
            # Its keys are not read, so no rule may report that one of them is missing.
            is_section = isinstance(content, dict)
            nearest = _closest(str(section), list(SECTIONS)) if is_section else _nearest(str(section))
            touched = [name for name in KEYS if nearest in (name, name.partition(".")[0])]
            problems.add(f"{path}:{line}: `{cut(section)}`: {_unknown('', str(section), nearest)}", *touched)
        elif isinstance(content, dict):
            key_nodes = _nodes(content_node)
            for key, value in content.items():
                key_line, _ = key_nodes.get(str(key), (line, None))
                settings.append(Setting(f"{path}:{key_line}", section, str(key), value))
        elif content is not None:  # a section with all its keys commented out is None
            names = [name for name in KEYS if name.startswith(f"{section}.")]
            problems.add(
                f"{path}:{line}: `{section}: {show(content)}`: expected a mapping of keys under a section.", *names
            )
    return settings


def _nodes(mapping: yaml.Node | None) -> dict[str, tuple[int, yaml.Node]]:
    """Key -> its line (from 1) and the node of its value."""
    pairs = mapping.value if isinstance(mapping, yaml.MappingNode) else ()
    return {str(key.value): (key.start_mark.line + 1, value) for key, value in pairs}


# Checking -----------------------------------------------------------------------------------------------------------


def _check(setting: Setting, problems: _Problems, shown: Setting | None = None) -> tuple[Any] | None:
    """The value in a 1-tuple, or None if it is invalid (and reported).

    Args:
        shown: what the user wrote, if that was another name.
    """
    shown = shown or setting
    annotation = _annotation(setting.section, setting.key)
    if annotation is None:
        nearest = _nearest(setting.key)
        problems.add(f"{shown}: {_unknown(setting.section, setting.key, nearest)}", setting.name, nearest)
        return None
    try:
        value = convert(_parse(setting.raw, annotation) if setting.raw else setting.value, annotation)
    except (NotAllowed, *_NOT_YAML):
        problems.add(f"{shown}: {_wrong_type(setting, annotation)}", setting.name)
        return None
    if why := _why_unusable(value):
        problems.add(f"{shown}: {why}", setting.name)
        return None
    words, test = (KEYS[setting.name].metadata["allowed"] if setting.name in KEYS else None) or ("", None)
    if test is not None and value is not None and not test(value):
        problems.add(f"{shown}: must be {words}.", setting.name)
        return None
    if setting.section == "training" and setting.key in CHOICES and value != DEFAULTS[setting.name]:
        known = choices(setting.key)
        if value not in known:
            longer = next((name for name in known if name.startswith(f"{value}_")), None)
            near = longer or _closest(str(value), known)
            nearest = f" Nearest is {near}." if near else ""
            problems.add(f"{shown}: unknown value.{nearest} Allowed: {', '.join(known)}.", setting.name)
            return None
    return (value,)


def _parse(raw: str, annotation: object) -> Any:
    """The text of a command-line value as YAML. If a string is allowed, it stays unchanged unless it is quoted, null or
    a list, mapping or bool that is also allowed: a prompt may contain `: ` or ` #`, a commit may look like a number."""
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


def _annotation(section: str, key: str) -> object:
    """The annotation of a key that can be set, None for any other."""
    if key in arguments.REFUSED:
        return None
    own = KEYS.get(f"{section}.{key}")
    if own is not None:
        return own.type
    if section == "training" and not any(name.endswith(f".{key}") for name in KEYS):  # those are in another section
        return sft_fields().get(key)
    return None


def _wrong_type(setting: Setting, annotation: object) -> str:
    """What was expected and, if quotes are missing or not wanted in a file, what to do."""
    expected, value = in_words(annotation), setting.value
    if setting.raw is None and str in members(annotation) and type(value) in (int, float):
        return f"expected {expected}, got a number. Put it in quotes."
    numeric = not {int, float}.isdisjoint(members(annotation))
    if setting.raw is None and numeric and isinstance(value, str) and _is_number(value):
        return f'expected {expected}, got the string "{show(value)}". Remove the quotes.'
    if setting.raw is None and isinstance(value, str) and value.lstrip().startswith("{"):
        return f"expected {expected}, got a string. Remove the quotes."
    return f"expected {expected}."


def _why_unusable(value: object) -> str | None:
    """What no path, name or count can be, whatever its key; None for all other values."""
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and "\0" in text for text in texts):
        return "contains a NUL character. Remove it."
    if type(value) is int and abs(value) >= 2**63:
        return "must be smaller than 2^63."
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown(section: str, key: str, nearest: str | None) -> str:
    """What is wrong with a key that cannot be set, and what to write instead."""
    today = arguments.former_names().get(key) or key
    if today in arguments.REFUSED:
        return f"cannot be set here: {arguments.REFUSED[today]}."
    what = f"unknown key of `{section}:`." if section in SECTIONS else "unknown section."
    if today != key:
        name = _todays_name(today)
        return f"{what} It is {name} now ({_summary(name)})."
    if nearest is None:
        remedy = f"See --help {section}." if section in SECTIONS else f"The sections are {', '.join(SECTIONS)}."
        return f"{what} {remedy}"
    target, _, target_key = nearest.partition(".")
    if target_key == key:
        return f"{what} It belongs under `{target}:`."
    return f"{what} Nearest is {nearest}" + (f" ({_summary(nearest)})." if target_key else ".")


def _nearest(key: str) -> str | None:
    """The known name that was most likely meant: that of another tool's name or the most similar key of any section. Of
    two that are equally similar, ours."""
    extra = (f"training.{name}" for name in sft_fields() if _annotation("training", name) is not None)
    names = {name.split(".")[1]: name for name in (*KEYS, *extra)} | arguments.FOREIGN
    nearest = _closest(key, list(names))
    return names[nearest] if nearest else None


_CUTOFF = 0.6  # the default of difflib.get_close_matches


def _closest(given: str, known: Sequence[str]) -> str | None:
    if len(given) > 4 * max(map(len, known)):  # comparing them would take long, and find nothing
        return None
    near = max(known, key=lambda name: _similarity(name, given))
    return near if _similarity(near, given) >= _CUTOFF else None


def _similarity(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower().replace("-", "_"), other.lower().replace("-", "_")).ratio()


def _summary(name: str) -> str:
    section, _, key = name.partition(".")
    return describe(_annotation(section, key)) + (f", default {show(DEFAULTS[name])}" if name in DEFAULTS else "")


# Writing ------------------------------------------------------------------------------------------------------------


def dump_setting(key: str, value: object) -> str:
    """`key: value` on one line, quoted where YAML needs it."""
    flow: Any = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": float("inf")}
    shown = yaml.dump(value, Dumper=_Dumper, **flow)
    return f"{key}: {shown.strip().removesuffix('...').strip()}"  # PyYAML ends a plain scalar with `...`


_RESOLVED = "# resolved from {} and the command line\n"


def resolved_from(file: str) -> str | None:
    """The configuration that a run.yaml was resolved from; None for any other file."""
    try:
        first = Path(file).read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, ValueError):  # gone, or no text
        return None
    found = re.fullmatch(_RESOLVED.strip().format("(.+)"), first)
    return found[1] if found else None


def dump_yaml(config: Config) -> str:
    """The resolved configuration as a file that `--config` reads back unchanged. Keys that would contradict others are
    left out: the adapter's in full fine-tuning, and num_train_epochs if max_steps is set."""
    resolved = config.to_dict()
    source = resolved.pop("config_file")
    resolved["training"] |= resolved["training"].pop("extra")
    if config.model.full_finetuning:
        del resolved["lora"]
    if config.training.max_steps > 0:
        del resolved["training"]["num_train_epochs"]
    resolved = redact_tree(resolved)
    header = _RESOLVED.format(resolved_from(source) or source) if source else ""
    return header + yaml.dump(resolved, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
