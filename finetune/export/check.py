"""Checks an exported model against what it was made from, with plain transformers and PEFT. Runs by its path, in a
separate process, and imports nothing of this project, so that a mistake of the project cannot hide itself.

    python -P check.py JOB.json      # writes its finding as one line of JSON, the last one of its output

The reference is the base model with the adapter unmerged, or the fully trained one. Compared are

1. every tensor: merged by PEFT in float32, layer by layer, and rounded as the export says, it must equal the exported
   one. Stochastic rounding to 16 bits is repeated with the same random numbers, from the tensor's name: the exported
   value lies between the roundings of reference +- slack. Rounding to nearest may be off by half a unit in the last
   place more. The slack is 2^-20 max|reference|, for float32's sums, which PEFT may add up in another order. A tensor
   that the adapter does not change must be equal in every bit;
2. the loss on rows of the run's data, held-out ones if it has any, or else on the reference's own greedy answers to a
   few prompts: it may be above the reference's by LOST of what the adapter gained over the base model, plus LOSS_NOISE;
3. the tokenizer: the tokens of the prompts, and the chat template.

A GGUF file is compared with the folder it was converted from: the number of tokens of each prompt, and the greedy
answers, which may part where the two best tokens are within TIE.

For a server, the reference and its base score the tokens that the server scored.
"""

from __future__ import annotations

import gc
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

Json: TypeAlias = dict[str, Any]
Model: TypeAlias = Any  # of transformers or PEFT

LOST = 0.1  # of what the adapter gained
LOSS_NOISE = 0.02  # in the mean loss of rows, by roundings
TIE = 0.5  # between two logits, for llama.cpp's activations and key-value cache in 16 bits
LOSS_TOKENS = {"cuda": (16_384, 16_384), "cpu": (256, 2048)}  # of all rows that the loss is of, at least and at most
LOSS_PRODUCTS = 5e11  # tokens times parameters, between these
ROW_TOKENS = 2048  # of one of them: the logits of a row are kept
IGNORED = -100
SIGNIFICANT_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of float32, in stochastic rounding
SLACK = 2.0**-20  # of a tensor's largest value
RESERVE = 2**30  # bytes for activations
SPARE = 8  # rows of a table of positions that may be for padding


def main() -> int:
    """Run the job of the file named on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        found = check(job)
    except Exception as error:  # libraries may print after the traceback
        sys.stdout.write("\n" + json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}) + "\n")
        raise
    found["imported_finetune"] = any(name.partition(".")[0] == "finetune" for name in sys.modules)
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


def check(job: Json) -> Json:
    """The finding of a job: {passed, why, ...}.

    The job: `base` and `adapter` (folders) or `model` (a folder) for the reference; `adapter_config`, in place of the
    file in `adapter`; `exported` (a folder) or `gguf` (a file); `tokenizer` (a folder), `prompts` (texts),
    `max_new_tokens`, `trust_remote_code`; `rows` ([input_ids, labels] of each) for the loss, or none. For a server:
    `sequences` ([token ids, where the scored ones begin] of each), `stops` (token ids) and, of a fully trained model,
    `before` (the folder of its base, or none).
    """
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.no_grad():
        return score(job) if "sequences" in job else _check_gguf(job) if "gguf" in job else check_folder(job)


# --- folders ----------------------------------------------------------------------------------------------------------


def check_folder(job: Json) -> Json:
    from transformers import AutoTokenizer

    exported = Path(job["exported"])
    trusted = bool(job.get("trust_remote_code"))
    before, tokenizer = (
        AutoTokenizer.from_pretrained(f, trust_remote_code=trusted) for f in (job["tokenizer"], exported)
    )
    prompts = [_token_ids(before, text) for text in job["prompts"]]
    found: Json = {"passed": False, "why": ""}
    if prompts != [_token_ids(tokenizer, text) for text in job["prompts"]]:
        return found | {"why": "the exported tokenizer gives other tokens"}
    if before.chat_template != tokenizer.chat_template and not job.get("new_template"):
        return found | {"why": "the exported tokenizer has another chat template"}
    device, dtype = choose_device(job)
    found |= {"device": str(device), "dtype": _dtype_name(dtype)}

    reference = _load(Path(job["adapter" if "adapter" in job else "model"]), job, dtype, device)
    least, most = LOSS_TOKENS[device.type]
    tokens = int(LOSS_PRODUCTS / sum(one.numel() for one in reference.parameters()))
    rows = take_rows(job.get("rows") or _answered(reference, prompts, job), min(max(tokens, least), most))
    losses = {"run": mean_loss(reference, rows)}
    if hasattr(reference, "disable_adapter"):
        with reference.disable_adapter():
            losses["base"] = mean_loss(reference, rows)
    if (exported / "adapter_config.json").is_file():
        found["tensors"] = _compare_files(Path(job["adapter"]), exported)
    else:
        stored = open_tensors(Path(job["model"])) if "model" in job else {}
        found["tensors"] = compare_tensors(reference, stored, exported)
        compare_unloaded(Path(job["model" if "model" in job else "base"]), exported, found["tensors"])
    del reference
    gc.collect()
    losses["export"] = mean_loss(_load(exported, job, dtype, device), rows)
    bound = LOST * max(losses.get("base", losses["run"]) - losses["run"], 0.0) + LOSS_NOISE
    found["loss"] = losses | {"bound": bound, "tokens": sum(_supervised(labels) for _, labels in rows)}
    found["why"] = verdict(found)
    found["passed"] = not found["why"]
    return found


def verdict(found: Json) -> str:
    """What is wrong, or ""."""
    wrong, loss = found["tensors"]["wrong"], found["loss"]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"the tensor {wrong[0]}{more}"
    if not loss["export"] - loss["run"] <= loss["bound"]:  # also if one is not a number
        return f"the loss is {loss['export']:.4f} instead of {loss['run']:.4f}, and may be {loss['bound']:.2g} higher"
    return ""


def choose_device(job: Json) -> tuple[torch.device, torch.dtype]:
    """Where to compute and in what dtype: float32 if a copy of the model fits, on the GPU if there is one."""
    folder = Path(job["base"] if "adapter" in job else job["exported"])
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    dtype = _stored_dtype(folder)
    quantized = "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters = stored * 2 if quantized else stored // dtype.itemsize
    free = []
    if torch.cuda.is_available():
        free.append((torch.device("cuda"), torch.cuda.mem_get_info()[0]))
    import psutil

    free.append((torch.device("cpu"), psutil.virtual_memory().available))
    for device, room in free:
        if 4 * parameters * 1.1 + RESERVE < room:
            return device, torch.float32
    return (free[0][0] if 2.2 * parameters + RESERVE < free[0][1] else torch.device("cpu")), dtype


def _stored_dtype(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for section in (config, config.get("text_config") or {}):
        name = section.get("dtype") or section.get("torch_dtype")
        if isinstance(name, str) and getattr(torch, name, None) in SIGNIFICANT_BITS:
            return getattr(torch, name)
    return torch.float32


def load_model(folder: Path, job: Json, dtype: torch.dtype, adapted: Sequence[str] = ()) -> Any:
    """The model of a folder, with all that it has beside text, unless the names in an adapter are of a text model."""
    import transformers

    named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    own: Any = getattr(transformers, named[0], None)
    of_text = own is None or not own.can_generate() or adapted and not any("language_model." in one for one in adapted)
    kind: Any = transformers.AutoModelForCausalLM if of_text else own
    loaded: Any = kind.from_pretrained(
        folder,
        output_loading_info=True,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=bool(job.get("trust_remote_code")),
    )
    model, report = loaded
    model.not_in_files = report["missing_keys"]
    missing = sorted(report["missing_keys"]) if model.config.get_text_config() is model.config else []
    if missing:  # of a model with towers for images, text may not need them
        raise ValueError(f"{folder} lacks {len(missing)} weights of the model, such as {missing[0]}")
    stacked = [parameter for parameter in model.parameters() if parameter.ndim == 3]
    if any(size * one.element_size() % 16 for one in stacked for size in one.shape[1:]):
        model.set_experts_implementation("eager")  # one by one: grouped products take rows of whole 16 bytes
    model.generation_config = transformers.GenerationConfig()  # greedy, without end tokens: for answers of equal length
    return model


def _in_files(model: Any, name: str, tensor: torch.Tensor, files: Json) -> Iterator[tuple[str, torch.Tensor]]:
    """What files have of a parameter: itself, or, by transformers' own conversion, a tensor for each expert and
    projection of it."""
    if name in files:
        yield name, tensor
        return
    from transformers.core_model_loading import revert_weight_conversion

    yield from revert_weight_conversion(model, {name: tensor}).items()


def _load(folder: Path, job: Json, dtype: torch.dtype, device: torch.device) -> Any:
    adapted = (folder / "adapter_config.json").is_file()
    model = load_with_adapter(job, folder, dtype) if adapted else load_model(folder, job, dtype)
    return model.to(device).eval()


def load_with_adapter(job: Json, adapter: Path, dtype: torch.dtype) -> Any:
    """Base and adapter side by side."""
    from peft import PeftConfig, PeftModel
    from safetensors import safe_open

    file = safe_open(adapter / "adapter_model.safetensors", framework="pt")
    base = load_model(Path(job["base"]), job, dtype, file.keys())
    if getattr(base, "is_quantized", False):
        base = base.dequantize(dtype=dtype).to(dtype)
    for key in file.keys():  # noqa: SIM118
        if key.endswith(("embed_tokens.weight", "embed_tokens.base_layer.weight", "lm_head.weight")):
            rows = file.get_slice(key).get_shape()[0]
            if rows != base.get_input_embeddings().weight.shape[0]:
                base.resize_token_embeddings(rows, mean_resizing=False)
    head = base.get_output_embeddings()
    if head is not None and head.weight is base.get_input_embeddings().weight and not _is_tied(Path(job["exported"])):
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # PEFT would merge into the shared weight
    given = job.get("adapter_config") if adapter == Path(job["adapter"]) else None
    config = PeftConfig.from_peft_type(**given) if given else None
    model = PeftModel.from_pretrained(base, adapter, config=config, local_files_only=True)
    stored = [file.get_tensor(key) for key in file.keys() if ".lora_" in key]  # noqa: SIM118
    loaded = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    one, two = (sum(int(tensor.count_nonzero()) for tensor in tensors) for tensors in (stored, loaded))
    if two < one:  # PEFT drops without a word what it does not know, such as experts of some models one by one
        raise ValueError(f"PEFT loads {two:,} of the adapter's {one:,} numbers")
    return model


def _is_tied(exported: Path) -> bool:
    file = exported / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))


# --- tensors ----------------------------------------------------------------------------------------------------------


def compare_tensors(reference: Model, stored: Json, exported: Path) -> Json:
    """Compare the exported tensors with the reference's, whose layers PEFT merges one at a time, and forget those.

    Args:
        stored: a fully trained model's tensors in their files, where they have the dtype that they were trained in.
    """
    where = open_tensors(exported)
    wrong: list[str] = []
    changed = 0
    seen: set[str] = set()
    shared: set[int] = set()
    plain = _plain(reference)
    for parameter, values, merged in _merged_tensors(reference):
        for name, tensor in _in_files(plain, parameter, values, where):
            if name not in where:
                if values.data_ptr() not in shared and parameter not in getattr(plain, "not_in_files", ()):
                    wrong.append(f"{name} is missing")
                continue
            shared.add(values.data_ptr())
            seen.add(name)
            own = where[name].get_tensor(name).to(tensor.device)
            whole = (stored[name].get_tensor(name).to(tensor.device) if name in stored else tensor.detach()).float()
            changed += merged
            if why := tensor_difference(name, own, whole, merged=merged):
                wrong.append(f"{name} {why}")
    unknown = sorted(set(where) - seen)
    return {"compared": len(seen), "changed": changed, "not_compared": unknown, "wrong": wrong}


def compare_unloaded(before: Path, exported: Path, found: Json) -> None:
    """Compare the tensors that no parameter of the model is, such as another tower's, with those in the files before.
    `not_compared` keeps those that these do not have."""
    stored, own = open_tensors(before), open_tensors(exported)
    for name in [name for name in found["not_compared"] if name in stored]:
        whole = stored[name].get_tensor(name).float()
        if why := tensor_difference(name, own[name].get_tensor(name), whole, merged=False):
            found["wrong"].append(f"{name} {why}")
        found["not_compared"].remove(name)
        found["compared"] += 1


def open_tensors(folder: Path) -> Json:
    """The file of each tensor of a model."""
    from safetensors import safe_open

    opened = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


def _plain(model: Any) -> Any:
    """The model inside of PEFT's."""
    return model.base_model.model if hasattr(model, "peft_config") else model


def _merged_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name in the plain model, tensor, whether the adapter changed it) of each parameter and saved buffer."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    plain = _plain(model)
    done: set[str] = set()
    modules: list[tuple[str, Any]] = list(plain.named_modules(remove_duplicate=False))
    for path, module in modules:
        kind = type(module)
        if any(path.startswith(f"{one}.") for one in done):
            continue
        if issubclass(kind, BaseTunerLayer):
            module.float()
            done.add(path)
            one: Any = module
            changed: set[str | None] = set()
            while issubclass(type(one), BaseTunerLayer):  # one around the other for each parameter of the experts
                one.merge()
                changed.add(getattr(one, "parameter_name", None))
                one = one.base_layer
            for name, tensor in one.state_dict().items():
                yield f"{path}.{name}", tensor, None in changed or name in changed
            module.to("meta")
        elif issubclass(kind, AuxiliaryTrainingWrapper):
            done.add(path)
            active = module.active_adapters[0]
            if hasattr(module, "modules_to_save"):
                yield from (
                    (f"{path}.{name}", one, True) for name, one in module.modules_to_save[active].state_dict().items()
                )
            else:
                if module.token_adapter.tied_adapter is None:  # a tied head is the embedding, merged already
                    module.token_adapter.merge()
                yield from ((f"{path}.{n}", t, True) for n, t in module.original_module.state_dict().items())
    saved = set(plain.state_dict())
    for name, tensor in [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers(remove_duplicate=False)]:
        if name in saved and not any(name.startswith(f"{one}.") for one in done):
            yield name, tensor, False


def tensor_difference(name: str, own: torch.Tensor, reference: torch.Tensor, *, merged: bool) -> str | None:
    """What differs, or None."""
    if own.shape != reference.shape:
        return f"has the shape {list(own.shape)} instead of {list(reference.shape)}"
    slack = SLACK * reference.abs().max() if merged else 0.0
    if own.dtype in DROPPED_BITS:
        least, most = (_round_stochastically(reference + shift, own.dtype, name) for shift in (-slack, slack))
        far = ~((least <= own) & (own <= most))
    else:
        far = ~((own - reference).abs() <= slack + (_spacing(reference, own.dtype) / 2 if merged else 0.0))
    far &= own != reference  # infinite numbers, as the limits of Gemma 4's towers, have no difference
    if not far.any():
        return None
    what = "off by more than a rounding" if merged else "not equal to the original"
    return f"is {what} in {int(far.sum())} of {far.numel()} values"


def _spacing(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between a number's neighbors in a dtype."""
    return torch.ldexp(torch.ones_like(numbers), numbers.frexp().exponent - SIGNIFICANT_BITS[dtype])


def _round_stochastically(exact: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """float32 numbers in 16 bits: the bits that are dropped, plus a random number of as many bits, carry or not. For
    the same random numbers a larger number never becomes a smaller one."""
    bits = DROPPED_BITS[dtype]
    generator = torch.Generator().manual_seed(zlib.crc32(f"0 {name}".encode()))
    random = torch.randint(1 << bits, exact.shape, dtype=torch.int32, generator=generator).to(exact.device)
    return ((exact.contiguous().view(torch.int32) + random) & (-1 << bits)).view(torch.float32).to(dtype)


def _compare_files(adapter: Path, exported: Path) -> Json:
    """Compare the tensors of two adapter files bit by bit."""
    from safetensors.torch import load_file

    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, exported))
    wrong = [f"{name} is missing" for name in sorted(one.keys() ^ two.keys())]
    wrong += [
        f"{name} is not equal to the original" for name in one if name in two and not torch.equal(one[name], two[name])
    ]
    return {"compared": len(one.keys() & two.keys()), "changed": 0, "not_compared": [], "wrong": wrong}


# --- answers and loss -------------------------------------------------------------------------------------------------


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt, which has its special tokens as text if it was made by a chat template."""
    bos = tokenizer.bos_token
    return list(tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"])


def _positions(model: Model) -> int:
    """Tokens that the model has positions for. Fewer than it says: the first of a table may be for padding."""
    config = model.config.get_text_config()
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len", "max_target_positions"))
    return min((most - SPARE for most in named if isinstance(most, int) and most > SPARE), default=sys.maxsize)


def _generate(model: Model, ids: list[int], count: int) -> list[int]:
    given, count = torch.tensor([ids], device=model.device), min(count, _positions(model) - len(ids))
    found = model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return found[0, len(ids) :].tolist()


def _logits(model: Model, ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary), float32 on the CPU."""
    given = torch.tensor([ids], device=model.device)
    return model(input_ids=given, attention_mask=torch.ones_like(given), use_cache=False).logits[0].float().cpu()


def _answered(model: Model, prompts: list[list[int]], job: Json) -> list[list[list[int]]]:
    """Rows of the model's own answers, for a run whose rows are not given."""
    prompts = [ids[: _positions(model) - 1] for ids in prompts]
    answers = [_generate(model, ids, job["max_new_tokens"]) for ids in prompts]
    return [[ids + own, [IGNORED] * len(ids) + own] for ids, own in zip(prompts, answers, strict=True)]


def take_rows(rows: list[list[list[int]]], most: int) -> list[tuple[list[int], list[int]]]:
    """As many rows as have `most` tokens, long ones and the last one cut. Left out are those without a supervised token
    then."""
    found = []
    for ids, labels in rows:
        kept = ids[: min(most, ROW_TOKENS)], labels[: min(most, ROW_TOKENS)]
        most -= len(kept[0])
        if _supervised(kept[1]):
            found.append(kept)
    return found


def _supervised(labels: list[int]) -> int:
    return sum(label != IGNORED for label in labels[1:])


def mean_loss(model: Model, rows: list[tuple[list[int], list[int]]]) -> float:
    """Mean over the supervised tokens of all rows."""
    losses = [
        torch.nn.functional.cross_entropy(
            _logits(model, ids)[:-1], torch.tensor(labels[1:]), ignore_index=IGNORED, reduction="sum"
        )
        for ids, labels in rows
    ]
    return float(sum(losses)) / sum(_supervised(labels) for _, labels in rows)


# --- tokens of a server -----------------------------------------------------------------------------------------------


def score(job: Json) -> Json:
    """Log-probabilities of the tokens of each sequence by the reference (`run`) and its base (`base`, or None), and the
    reference's probability of an end token before each of them and after the last (`ends`)."""
    device, dtype = choose_device(job)
    found: Json = {"passed": True, "why": "", "device": str(device), "dtype": _dtype_name(dtype), "base": None}
    model = _load(Path(job["adapter" if "adapter" in job else "model"]), job, dtype, device)
    found |= dict(zip(("run", "ends"), _scores(model, job), strict=True))
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            found["base"], _ = _scores(model, job)
    elif job.get("before"):
        del model
        gc.collect()
        found["base"], _ = _scores(_load(Path(job["before"]), job, dtype, device), job)
    return found


def _scores(model: Model, job: Json) -> tuple[list[list[float]], list[list[float]]]:
    scores, ends = [], []
    for ids, start in job["sequences"]:
        logs = _logits(model, ids)[start - 1 :].log_softmax(-1)
        own = torch.tensor(ids[start:], dtype=torch.long)
        scores.append(logs[:-1].gather(1, own[:, None])[:, 0].tolist())
        ends.append(logs[:, job["stops"]].exp().sum(-1).tolist())
    return scores, ends


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _check_gguf(job: Json) -> Json:
    """Compare llama.cpp on the GGUF file with transformers on the folder it was converted from."""
    import xllamacpp  # pyright: ignore[reportMissingImports]  # an extra
    from transformers import AutoTokenizer

    folder = Path(job["exported"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device, dtype = choose_device(job)
    model = _load(folder, job, dtype, device)
    prompts = [_token_ids(tokenizer, text) for text in job["prompts"]]
    ends = _stop_tokens(folder, tokenizer)
    answers = [_up_to(ends, _generate(model, ids, job["max_new_tokens"])) for ids in prompts]
    gaps = []
    for ids, answer in zip(prompts, answers, strict=True):
        best = _logits(model, ids + answer)[len(ids) - 1 : -1].topk(2).values
        gaps.append((best[:, 0] - best[:, 1]).tolist())
    del model
    gc.collect()

    parameters = xllamacpp.CommonParams()
    parameters.model.path = job["gguf"]
    parameters.n_ctx = 2 * max(len(ids) + len(answer) for ids, answer in zip(prompts, answers, strict=True)) + 64
    parameters.n_parallel, parameters.warmup = 1, False
    server = xllamacpp.Server(parameters)
    found: Json = {"passed": False, "why": "", "device": str(device), "dtype": _dtype_name(dtype), "answers": []}
    found["library"] = f"xllamacpp {getattr(xllamacpp, '__version__', '')}".strip()
    for text, ids, answer, gap in zip(job["prompts"], prompts, answers, gaps, strict=True):
        request = {"prompt": text, "n_predict": len(answer), "temperature": 0.0, "cache_prompt": False}
        reply = server.handle_completions(request)
        if error := reply.get("error"):
            return found | {"why": f"llama.cpp cannot read the prompt {text!r}: {error.get('message')}"}
        read = reply["usage"]["prompt_tokens"]
        if read != len(ids):
            return found | {"why": f"llama.cpp reads a prompt as {read} tokens instead of {len(ids)}"}
        found["answers"].append(compare_answers(answer, reply["choices"][0]["text"], gap, tokenizer))
    found["passed"] = all(one["outcome"] != "differs" for one in found["answers"])
    return found | {"why": "" if found["passed"] else "an answer differs"}


def compare_answers(wanted: list[int], own: str, gaps: list[float], tokenizer: Any) -> Json:
    """An answer and the text of llama.cpp's: whether they are equal, differ, or differ from a tie on.

    Args:
        gaps: between the logits of the two best tokens, at each token of the answer.
    """

    def whole(text: str) -> str:  # without the space before it and a character that is not complete
        return text.rstrip("\ufffd").strip()

    begun = [tokenizer.decode(wanted[:count], skip_special_tokens=True) for count in range(len(wanted) + 1)]
    found = {"expected": begun[-1], "found": own, "tokens": len(wanted)}
    if whole(own) == whole(begun[-1]):
        return found | {"outcome": "equal"}
    same = [whole(own).startswith(whole(text)) for text in begun]
    margin = gaps[same.index(False) - 1 if False in same else -1]
    return found | {"outcome": "tie" if margin <= TIE else "differs", "margin": margin}


def _up_to(ends: set[int], answer: list[int]) -> list[int]:
    """An answer up to its first end token, at which llama.cpp stops."""
    place = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    return answer[: place + 1]


def _stop_tokens(folder: Path, tokenizer: Any) -> set[int]:
    """Tokens that end an answer."""
    file = folder / "generation_config.json"
    given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return {tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])} - {None}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    raise SystemExit(main())
