"""Imports and calls the Python code that a configuration names (logging.trust_code), and reports its errors by name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.config.load import resolved_from
from finetune.config.schema import LoggingConfig
from finetune.errors import RunError, UserError, describe


def configured(logging: LoggingConfig) -> list[tuple[str, str]]:
    """(key, package.module:name) of everything that the configuration names."""
    found = [("logging.metric", logging.metric)] if logging.metric else []
    return found + [("logging.callbacks", name) for name in logging.callbacks or ()]


def check(key: str, name: str, config_file: str | None) -> None:
    """Check that the package exists, without importing it: Unsloth must be imported before transformers.

    Raises:
        UserError: it does not.
    """
    package = name.partition(":")[0].partition(".")[0]
    _add_search_paths(config_file)
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise _not_found(key, name, package, config_file)


def load(key: str, name: str, config_file: str | None) -> Any:
    """The function or class that `package.module:name` stands for. Import it after the backend has started.

    Modules are found as Python finds them, in the working directory, and next to the configuration file.

    Raises:
        UserError: the module or the name does not exist, or importing it fails.
    """
    module_name, _, attribute = name.partition(":")
    _add_search_paths(config_file)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise _not_found(key, name, error.name, config_file) from None
        raise UserError(f"{key} is {name}: importing it fails ({describe(error)}). Install what it needs.") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{key} is {name}: importing it fails ({describe(error)}). Correct {module_name}.") from error
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, [one for one in vars(module) if not one.startswith("_")], n=1)
        hint = f"Nearest is {near[0]}." if near else f"Define it in {getattr(module, '__file__', module_name)}."
        raise UserError(f"{key} is {name}: {module_name} has no {attribute}. {hint}")
    if not callable(found):
        raise UserError(
            f"{key} is {name}: it is a {type(found).__name__}, and cannot be called. Name a function or class."
        )
    return found


@contextlib.contextmanager
def user_errors(key: str, name: str, doing: str = "") -> Iterator[None]:
    """Turn an exception of the user's code into one sentence.

    Args:
        doing: what it was called for, such as "on_step_end".
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # after sys.exit() on one rank, the others would wait for it
        where = f" in {doing}" if doing else ""
        text = " ".join(describe(error).split())[:300].rstrip(".")
        again = "resume the run" if key.startswith("logging.") else "run it again"
        raise RunError(f"{key}: {name} failed{where}{_line(error)}: {text}. Correct it, then {again}.") from error


def _line(error: BaseException) -> str:
    """The place of the error: file and line of the innermost frame that is not of an installed library."""
    place, frame = "", error.__traceback__
    others = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent), "<")
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith(others):
            place = f" at {Path(file).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def _add_search_paths(config_file: str | None) -> None:
    """Also look for modules in the working directory and the configuration's folder, after all other places; for a
    run.yaml also in the folder of the configuration that it was resolved from."""
    named = [config_file, resolved_from(config_file)] if config_file else []
    places = [str(Path.cwd()), *(str(Path(file).resolve().parent) for file in named if file)]
    sys.path += [place for place in dict.fromkeys(places) if place not in sys.path]  # to stay: functions import late
    importlib.invalidate_caches()


def _not_found(key: str, name: str, module: str, config_file: str | None) -> UserError:
    or_next_to = f", or next to {resolved_from(config_file) or config_file}" if config_file else ""
    return UserError(
        f"{key} is {name}: there is no module {module} here. Install it, put it into the working directory"
        f"{or_next_to}, or correct the name."
    )
