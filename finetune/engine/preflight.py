"""Preflight checks before any heavy import: the model's files, the dataset and the optimizer's package."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from finetune.config import Config
from finetune.config.data_sources import evaluation_sources, training_sources
from finetune.config.rules import TRACKERS
from finetune.errors import UserError
from finetune.runtime import user_code
from finetune.runtime.command import warn
from finetune.runtime.files import open_regular, read_json, read_text, safetensors_header, special_entry

HUB_SECONDS = 4.0  # to connect to the Hub; a connection takes a few round trips, and a second try for a lost packet
ADAPTER = "adapter_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SHAPES = ("config.json", ADAPTER)  # one of them describes the other files
# Prefixes of optimizer names (`transformers.training_args.OptimizerNames`), their module, its name for pip.
PACKAGES = (
    (("adamw_8bit", "adamw_bnb_", "ademamix", "lion_", "paged_", "rmsprop_"), "bitsandbytes", "bitsandbytes"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("adamw_torch_xla",), "torch_xla", "torch_xla"),
    (("adamw_torch_npu_fused",), "torch_npu", "torch-npu"),
    (("adamw_anyprecision",), "torchdistx", "torchdistx"),
    (("galore_",), "galore_torch", "galore-torch"),
    (("apollo_",), "apollo_torch", "apollo-torch"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_",), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
)


def check(config: Config) -> None:
    """Check that the model, the dataset and the optimizer of a configuration can be used here.

    Raises:
        UserError: what is missing, and what to do.
    """
    check_optimizer(config.training.optim)
    check_trackers(config.logging.trackers)
    for key, name in user_code.configured(config.logging):
        user_code.check(key, name, config.config_file)
    check_model(config)
    check_data(config)


def check_model(config: Config) -> None:
    """Check that the folder or the Hub's cache holds a model, and one that the configuration can train. Names that are
    not in the cache are checked when the Hub is asked.

    Raises:
        UserError: there is no model, or it is an adapter but the configuration does not continue one.
    """
    name = str(config.model.model_name_or_path)
    folder = Path(name)
    check_regular(folder)
    if folder.is_dir() and not any((folder / file).is_file() for file in SHAPES):
        raise UserError(
            f"model.model_name_or_path is {name}, a folder with neither {SHAPES[0]} nor {ADAPTER}. Give the folder "
            "that `save_pretrained` wrote, or the model's name on the Hub."
        )
    if not folder.is_dir() and _hub_is_off() and not any(_cached(config, file) for file in SHAPES):
        raise UserError(
            f"HF_HUB_OFFLINE is set, and model.model_name_or_path is {name}: there is no such folder and no such model "
            f"in the cache. Unset it, or download the model first with `hf download {name}`; check the spelling."
        )
    if not folder.is_dir() and not _hub_is_off():
        if any(_cached(config, file) for file in SHAPES):
            use_cache_without_network()
        else:
            check_hub(f"model.model_name_or_path is {name}")
    if folder.is_dir():
        _check_folder(folder)
    _check_adapter(config, _found(config))
    base_folder(config)
    _check_code(config)


def _check_code(config: Config) -> None:
    """A model without a class in transformers that ships Python code needs permission to run it."""
    if config.model.trust_remote_code:
        return
    content = _json(config, "config.json")
    code = content.get("auto_map")
    kind = str(content.get("model_type", ""))
    package = importlib.util.find_spec("transformers")
    models = Path(package.origin or "").parent / "models" if package else None
    if isinstance(code, dict) and code and models and not (kind and (models / kind.replace("-", "_")).is_dir()):
        raise _needs_code(str(config.model.model_name_or_path), "config.json", code)


def _json(config: Config, name: str) -> dict:
    """One of the model's JSON files as an object, empty if it does not exist here."""
    folder = Path(str(config.model.model_name_or_path))
    file = folder / name if folder.is_dir() else _cached(config, name)
    try:
        content = read_json(file) if file and file.is_file() else {}
    except (OSError, ValueError):  # loading reports the error better
        return {}
    return content if isinstance(content, dict) else {}


def _needs_code(name: str, file: str, code: object) -> UserError:
    given = code.values() if isinstance(code, dict) else [code]
    texts = [text for item in given for text in (item if isinstance(item, list) else [item]) if text]
    modules = ", ".join(sorted({str(text) for text in texts})[:3])
    return UserError(
        f"model.model_name_or_path is {name}, whose {file} asks to run Python code that ships with the model"
        + (f" ({modules})" if modules else "")
        + ". Read that code, then set model.trust_remote_code: true, or use a model that transformers knows."
    )


def check_refused(name: str, what: str, error: Exception) -> None:
    """Raise a UserError if loading failed because the model's files contain code; ignore other errors.

    Args:
        what: "model" or "tokenizer".
    """
    text = str(error)
    if "trust_remote_code" in text:
        files = ("tokenizer_config.json", "config.json") if what == "tokenizer" else ("config.json",)
        for file in files:
            path = Path(name) / file
            content = read_text(path, errors="replace") if path.is_file() else ""
            if "auto_map" in content:
                raise _needs_code(name, file, json.loads(content).get("auto_map")) from None
        file = "custom_generate" if (Path(name) / "custom_generate").is_dir() else files[0]
        raise _needs_code(name, file, "") from None
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text or "Weights only load failed" in text:
        files = sorted(path.name for path in Path(name).glob("*.bin")) if Path(name).is_dir() else []
        raise UserError(
            f"model.model_name_or_path is {name}, whose {', '.join(files[:3]) or 'pickled weights'} cannot be read as"
            " plain weights: loading pickled Python objects could run code, so it was refused. Use the model's"
            f" safetensors files (`hf download {name} --include '*.safetensors' '*.json'`), or, if you trust the file,"
            " load it with torch elsewhere and save the model with save_pretrained, which writes safetensors."
        ) from None


def check_data(config: Config) -> None:
    """Check that each dataset of the Hub is in the cache, or that the Hub can be reached.

    Raises:
        UserError: there is no connection at all.
    """
    from huggingface_hub import constants

    origins = [*training_sources(config.data), *evaluation_sources(config.data)]
    names = dict.fromkeys(origin.name for origin in origins if origin.name is not None)
    for name in names:
        if Path(name).exists() or _hub_is_off():
            continue
        folder = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
        if folder.is_dir():
            use_cache_without_network()
        else:
            check_hub(f"{'data.dataset_name' if config.data.dataset_name == name else 'the dataset'} is {name}")


def use_cache_without_network() -> None:
    """If the Hub cannot be reached, behave as with HF_HUB_OFFLINE=1: the libraries would request each file several
    times before they use the cached one. Call it before they are imported."""
    from huggingface_hub import constants

    if why_unreachable(tries=1) is not None:
        warn(f"{constants.ENDPOINT} cannot be reached; using the files in the cache.")
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


def check_hub(given: str) -> None:
    """Check that the Hub can be reached: the libraries try ten times before they give up.

    Args:
        given: the key and its value.

    Raises:
        UserError: it cannot.
    """
    from huggingface_hub import constants

    if (why := why_unreachable()) is not None:
        raise UserError(
            f"{constants.ENDPOINT} cannot be reached ({why}), and {given}, which is neither a local folder nor in the "
            "cache. Check the network, HF_ENDPOINT and the proxy variables, then the spelling; or give a folder."
        )


def why_unreachable(tries: int = 2) -> str | None:
    """Why the Hub cannot be reached, known within HUB_SECONDS; None if it can. A slow answer is an answer.

    A thread asks, because nothing else bounds the time that looking up the host's name takes.
    """
    found: list[str | None] = []
    asking = threading.Thread(target=lambda: found.append(_try_to_connect(tries)), daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return found[0] if found else f"no connection within {HUB_SECONDS:.0f} s"


def _try_to_connect(tries: int) -> str | None:
    """The error of connecting to the Hub, 1 s apart; None once it is connected."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    why = None
    for left in reversed(range(tries)):
        try:
            get_session().head(constants.ENDPOINT, timeout=httpx.Timeout(HUB_SECONDS - 1, read=1.0))
            return None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # no route, no such host, refused, or dropped
            why = str(error) or "the connection timed out"
            time.sleep(1 if left else 0)
        except httpx.HTTPError:  # slow, or a response that only the real request can interpret
            return None
    return why


def check_regular(folder: Path) -> None:
    """Check that a folder, if it exists, holds only regular files: libraries that load a model open whatever is there.

    Raises:
        UserError: it holds a FIFO, a socket or a device.
    """
    for part in (folder, folder / "additional_chat_templates"):
        if part.is_dir() and (found := special_entry(part)):
            raise UserError(
                f"{part} cannot be loaded as a model: {found}, not a regular file. Remove it, or copy the model again."
            )


def _check_folder(folder: Path) -> None:
    """Check that configuration files are JSON objects and that weight files match the sizes in their headers."""
    for name in (*SHAPES, *TOKENIZER):
        if (folder / name).is_file():
            read_object(folder / name)
    for file in sorted(folder.glob("*.safetensors")):
        if why := why_damaged(file):
            raise UserError(
                f"model.model_name_or_path is {folder}: its {file.name} is damaged ({why}). Copy or download it again."
            )


def read_object(file: Path) -> dict:
    """A JSON object of a model's folder. Raises UserError if it cannot be read or is something else."""
    try:
        found = read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}. Copy or download the model again.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. Check the permissions of the model.") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} must be a JSON object: it is a {type(found).__name__}. Copy the model again.")
    return found


def why_damaged(file: Path) -> str | None:
    """What is wrong with a safetensors file, judged by its header: 8 bytes of length, JSON with offsets, data."""
    try:
        size = file.stat().st_size
        with open_regular(file) as content:
            header, start = safetensors_header(content)
        expected = start + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except EOFError:
        return f"it has {size:,} bytes, too few for its header"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "its header is not valid"
    return None if size == expected else f"it has {size:,} bytes instead of {expected:,}"


def adapter(config: Config) -> dict | None:
    """The model's adapter_config.json, from the Hub if necessary; None for a full model.

    Raises:
        UserError: it is an adapter but the configuration does not continue one.
    """
    found = _found(config) or _on_hub(config)
    _check_adapter(config, found)
    return found


def base_folder(config: Config) -> Path | None:
    """Folder of the base model: local, or a snapshot in the Hub's cache. For an adapter, the folder of its base. None
    if it is not on this machine yet."""
    name, revision = str(config.model.model_name_or_path), config.model.revision
    if (adapter := _found(config)) is not None:
        name, revision = str(adapter.get("base_model_name_or_path")), None
    return folder_of(name, revision)


def folder_of(name: str, revision: str | None = None) -> Path | None:
    """Folder of a model: local, or a snapshot in the Hub's cache. None if it is not on this machine.

    Raises:
        UserError: it holds something else than regular files.
    """
    file = None if Path(name).is_dir() else _cached_file(name, SHAPES[0], revision)
    folder = Path(name) if Path(name).is_dir() else file and file.parent
    if folder is not None:
        check_regular(folder)
    return folder


def _found(config: Config) -> dict | None:
    """The adapter's configuration in the folder or the cache."""
    folder = Path(str(config.model.model_name_or_path))
    file = folder / ADAPTER if folder.is_dir() else _cached(config, ADAPTER)
    return read_object(file) if file and file.is_file() else None


def _cached(config: Config, file: str) -> Path | None:
    return _cached_file(str(config.model.model_name_or_path), file, config.model.revision)


def _cached_file(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:  # not a valid name on the Hub
        return None
    return Path(found) if isinstance(found, str) else None


def _on_hub(config: Config) -> dict | None:
    import httpx
    from huggingface_hub import file_exists, hf_hub_download
    from huggingface_hub.errors import HFValidationError

    name, revision = str(config.model.model_name_or_path), config.model.revision
    if Path(name).is_dir() or _hub_is_off():
        return None
    try:
        if not file_exists(name, ADAPTER, revision=revision):
            return None
        return read_json(Path(hf_hub_download(name, ADAPTER, revision=revision)))
    except (httpx.HTTPError, HFValidationError, OSError):
        return None  # loading the model reports the error better


def _hub_is_off() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _check_adapter(config: Config, adapter: dict | None) -> None:
    if adapter is None:
        return
    name, base = config.model.model_name_or_path, adapter.get("base_model_name_or_path")
    if config.model.full_finetuning:
        raise UserError(
            f"model.model_name_or_path is {name}, an adapter of {base}, and model.full_finetuning is set. Merge the "
            "adapter first, or give the base model."
        )
    if not config.lora.continue_adapter:
        raise UserError(
            f"model.model_name_or_path is {name}, which is already an adapter of {base}. A second adapter would "
            "replace it. To continue training this one, set lora.continue_adapter: true; to start a new one, give "
            "the base model."
        )
    wanted = {"r": config.lora.r, "lora_alpha": config.lora.lora_alpha}
    found = {key: adapter.get(key) for key in wanted}
    if wanted != found:
        raise UserError(
            f"lora.continue_adapter keeps the shape of {name}, which has {found}; the configuration has {wanted}. "
            "Set lora.r and lora.lora_alpha to the adapter's values."
        )


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of the trackers in logging.report_to are installed.

    Raises:
        UserError: one is not; it names all of them.
    """
    missing = [name for name in names if importlib.util.find_spec(TRACKERS[name][0]) is None]
    if missing:
        packages = " ".join(TRACKERS[name][1] for name in missing)
        raise UserError(
            f"logging.report_to names {', '.join(missing)}, which is not installed here. Run `pip install {packages}`, "
            "or remove it."
        )


def check_optimizer(name: str) -> None:
    """Check that the package of the optimizer `name` is installed.

    Raises:
        UserError: it is not.
    """
    for beginnings, module, package in PACKAGES:
        if name.startswith(beginnings) and importlib.util.find_spec(module) is None:
            raise UserError(
                f"training.optim: {name} needs the package {package}, which is not installed here. Run "
                f"`pip install {package}`, or omit training.optim to use torch's AdamW."
            )
