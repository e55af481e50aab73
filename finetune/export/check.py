"""Checks an exported model against what it was made from, with plain transformers and PEFT. Runs by its path, in a
separate process, and imports nothing of this project, so that a mistake of the project cannot hide itself.

    python -P check.py JOB.json      # writes its finding as one line of JSON, the last one of its output

The reference is the base model with the adapter unmerged, or the fully trained one. Compared are

1. every tensor: merged by PEFT in float32, layer by layer, and rounded as the export says, it must equal the exported
   one. Stochastic rounding to 16 bits is repeated with the same random numbers, from the tensor's name: the exported
   value lies between the roundings of reference +- slack. Rounding to nearest may be off by half a unit in the last
   place more. The slack is 2^-20 max|reference|, for float32's sums, which PEFT may add up in another order. A tensor
   that the adapter does not change must be equal in every bit;
2. the logits of a few prompts and their answers: they may differ by at most FACTOR times what random roundings of the
   same size do to the same model, which this measures: each changed weight times (1 + u t), and each linear layer's
   output plus c t times its root mean square, with t uniform in [-1, 1]. Rounding to nearest to p significant bits has
   u = 2^-p (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 2.2). Stochastic rounding has the
   u that gives t's disturbance the variance of the rounding, q (1 - q) of a squared unit for a weight that is q units
   above the number below it. c is u of the computation, at least 2^-24 sqrt(n) for sums of n products (Higham and Mary,
   A New Approach to Probabilistic Rounding Error Analysis, 2019). A router's choice between experts with nearly equal
   scores may change with any rounding, and the logits with it by more than roundings of the same choice. So a mixture
   of experts computes these logits with the experts that the reference chooses, and the choices are counted: other
   ones may be at most FACTOR times as many as with the random roundings, and OTHER_CHOICES of all;
3. the greedy answers: equal, unless the two best tokens are closer than twice that bound, or a router chooses another
   expert on the way;
4. the loss on rows of the run's data, held-out ones if it has any: LOST of what the adapter gained over the base model
   may be lost, plus what those random roundings change at a token, on average.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

Json: TypeAlias = dict[str, Any]

FACTOR = 4.0
LOST = 0.1
OTHER_CHOICES = 0.02
LOSS_TOKENS = {"cuda": (16_384, 16_384), "cpu": (256, 2048)}  # of all rows that the loss is of, at least and at most
LOSS_PRODUCTS = 5e11  # tokens times parameters, between these
ROW_TOKENS = 2048  # of one of them: the logits of a row are kept
IGNORED = -100
SIGNIFICANT_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of float32, in stochastic rounding
SLACK = 2.0**-20  # of a tensor's largest value
RESERVE = 2**30  # bytes for activations
SPARE = 8  # rows of a table of positions that may be for padding
GGUF_TOP = 20  # log-probabilities that llama.cpp is asked for, at each position


class Model(Protocol):
    """A transformers or PEFT model, by what is used here."""

    config: Any

    @property
    def device(self) -> torch.device: ...
    def __call__(self, **inputs: object) -> Any: ...
    def generate(self, **options: object) -> torch.Tensor: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...
    def modules(self) -> Iterator[torch.nn.Module]: ...


def main() -> int:
    """Run the job of the file named on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started = time.perf_counter()
    try:
        found = check(job)
    except Exception as error:  # libraries may print after the traceback
        sys.stdout.write("\n" + json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}) + "\n")
        raise
    found["seconds"] = time.perf_counter() - started
    found["imported_finetune"] = any(name.partition(".")[0] == "finetune" for name in sys.modules)
    found["peak_host_gib"] = _peak_host()
    if torch.cuda.is_available():
        found["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


def check(job: Json) -> Json:
    """The finding of a job: {passed, why, ...}.

    The job: `base` and `adapter` (folders) or `model` (a folder) for the reference; `adapter_config`, in place of the
    file in `adapter`; `exported` (a folder) or `gguf` (a file); `tokenizer` (a folder), `prompts` (texts),
    `max_new_tokens`, `trust_remote_code`; `rows` ([input_ids, labels] of each) for the loss.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.no_grad():
        return _check_gguf(job) if "gguf" in job else check_folder(job)


# --- folders ----------------------------------------------------------------------------------------------------------


def check_folder(job: Json) -> Json:
    from transformers import AutoTokenizer

    exported = Path(job["exported"])
    trusted = bool(job.get("trust_remote_code"))
    before, tokenizer = (
        AutoTokenizer.from_pretrained(f, trust_remote_code=trusted) for f in (job["tokenizer"], exported)
    )
    prompts = [_token_ids(before, text) for text in job["prompts"]]
    found: Json = {"passed": False, "why": "", "factor": FACTOR}
    if prompts != [_token_ids(tokenizer, text) for text in job["prompts"]]:
        return found | {"why": "the exported tokenizer gives other tokens"}
    if before.chat_template != tokenizer.chat_template and not job.get("new_template"):
        return found | {"why": "the exported tokenizer has another chat template"}
    device, dtype = choose_device(job)
    found |= {"device": str(device), "dtype": _dtype_name(dtype)}

    reference = _load_reference(job, dtype, device, len(tokenizer), exported)
    prompts = [ids[: _positions(reference) - 1] for ids in prompts]
    answers = [_generate(reference, ids, job["max_new_tokens"]) for ids in prompts]
    asked = [ids + answer for ids, answer in zip(prompts, answers, strict=True)]
    choices = [Choices() for _ in asked]
    wanted = [_logits(reference, ids, one) for ids, one in zip(asked, choices, strict=True)]
    least, most = LOSS_TOKENS[device.type]
    tokens = int(LOSS_PRODUCTS / sum(one.numel() for one in reference.parameters()))
    rows = take_rows(job.get("rows") or [], min(max(tokens, least), most))
    losses = {"run": token_losses(reference, rows)}
    if hasattr(reference, "disable_adapter"):
        with reference.disable_adapter():
            losses["base"] = token_losses(reference, rows)
    if (exported / "adapter_config.json").is_file():
        found["tensors"], rounded = _compare_files(Path(job["adapter"]), exported), {}
    else:
        stored = open_tensors(Path(job["model"])) if "model" in job else {}
        found["tensors"], rounded = compare_tensors(reference, stored, exported, dtype)
        compare_unloaded(Path(job["model" if "model" in job else "base"]), exported, found["tensors"])
    del reference
    gc.collect()

    model = _load_export(job, exported, dtype, device)
    own_answers = [_generate(model, ids, job["max_new_tokens"]) for ids in prompts]
    chosen, of_noisy = [Choices(one.experts) for one in choices], [Choices(one.experts) for one in choices]
    own = [_logits(model, ids, one) for ids, one in zip(asked, chosen, strict=True)]
    losses["export"] = token_losses(model, rows)
    _add_roundings(model, rounded, dtype)
    noisy = [_logits(model, ids, one) for ids, one in zip(asked, of_noisy, strict=True)]
    losses["noisy"] = token_losses(model, rows)

    bound = FACTOR * _largest_difference(own, noisy)
    found["logits"] = {
        "difference": _largest_difference(wanted, own),
        "bound": bound,
        "largest": max(float(x.abs().max()) for x in wanted),
    }
    if rows:
        found["loss"] = compare_losses(losses)
    if any(one.experts for one in choices):
        found["experts"] = {
            "chosen": sum(one.count for one in chosen),
            "others": sum(one.others for one in chosen),
            "bound": FACTOR * sum(one.others for one in of_noisy) + OTHER_CHOICES * sum(one.count for one in chosen),
        }
    lengths = [len(ids) for ids in prompts]
    nears = [math.inf if one.others else 2 * bound for one in chosen]
    found["answers"] = [
        compare_answers(*one, tokenizer) for one in zip(answers, own_answers, wanted, lengths, nears, strict=True)
    ]
    found["why"] = verdict(found)
    found["passed"] = not found["why"]
    return found


def verdict(found: Json) -> str:
    """What is wrong, or ""."""
    wrong, logits = found["tensors"]["wrong"], found["logits"]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"the tensor {wrong[0]}{more}"
    if not logits["difference"] <= logits["bound"]:  # also if one is not a number
        return f"logits differ by {logits['difference']:.3g}, and rounding explains {logits['bound']:.3g}"
    experts = found.get("experts")
    if experts and experts["others"] > experts["bound"]:
        return (
            f"routers choose {experts['others']} of {experts['chosen']} experts differently, and rounding explains "
            f"{experts['bound']:.0f}"
        )
    if any(one["outcome"] == "differs" for one in found["answers"]):
        return "an answer differs"
    loss = found.get("loss")
    if loss and not loss["export"] - loss["run"] <= loss["bound"]:
        return (
            f"the loss on the run's rows is {loss['export']:.4f} instead of {loss['run']:.4f}, and rounding explains "
            f"{loss['bound']:.2g}"
        )
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


def load_model(folder: Path, job: Json, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=bool(job.get("trust_remote_code")),
    )
    stored = open_tensors(folder) if dtype in DROPPED_BITS else {}
    for name in [name for name, _ in model.named_parameters()] if stored else []:
        parameter = model.get_parameter(name)
        parts = [part for part, _ in _in_files(model, name, parameter, stored)]
        if parameter.dtype == dtype and all(_is_wide(stored, part) for part in parts):
            # transformers rounds to nearest, which loses small updates
            _load(model, {part: _round_stochastically(stored[part].get_tensor(part), dtype, part) for part in parts})
    stacked = [parameter for parameter in model.parameters() if parameter.ndim == 3]
    if any(size * one.element_size() % 16 for one in stacked for size in one.shape[1:]):
        model.set_experts_implementation("eager")  # one by one: grouped products take rows of whole 16 bytes
    model.generation_config = GenerationConfig()  # greedy, and without end tokens, for answers of equal length
    return model


def _is_wide(stored: Json, name: str) -> bool:
    return name in stored and stored[name].get_slice(name).get_dtype() == "F32"


def _load(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Load tensors with the names of the model's files, all of a parameter."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    convert_and_load_state_dict_in_model(model, tensors, LoadStateDictConfig(weight_mapping=model._weight_conversions))


def _in_files(model: Any, name: str, tensor: torch.Tensor, files: Json) -> Iterator[tuple[str, torch.Tensor]]:
    """What files have of a parameter: itself, or, by transformers' own conversion, a tensor for each expert and
    projection of it."""
    if name in files:
        yield name, tensor
        return
    from transformers.core_model_loading import revert_weight_conversion

    yield from revert_weight_conversion(model, {name: tensor}).items()


def _load_reference(job: Json, dtype: torch.dtype, device: torch.device, tokens: int, exported: Path) -> Any:
    """The model before the export: base and adapter side by side, or the fully trained model."""
    if "adapter" not in job:
        return load_model(Path(job["model"]), job, dtype).to(device).eval()
    return load_with_adapter(job, Path(job["adapter"]), dtype, device, exported)


def _load_export(job: Json, exported: Path, dtype: torch.dtype, device: torch.device) -> Any:
    if (exported / "adapter_config.json").is_file():
        return load_with_adapter(job, exported, dtype, device, exported)
    return load_model(exported, job, dtype).to(device).eval()


def load_with_adapter(job: Json, adapter: Path, dtype: torch.dtype, device: torch.device, exported: Path) -> Any:
    from peft import PeftConfig, PeftModel
    from safetensors import safe_open

    base = load_model(Path(job["base"]), job, dtype)
    if getattr(base, "is_quantized", False):
        base = base.dequantize(dtype=dtype).to(dtype)
    for key in (file := safe_open(adapter / "adapter_model.safetensors", framework="pt")).keys():
        if key.endswith(("embed_tokens.weight", "embed_tokens.base_layer.weight", "lm_head.weight")):
            rows = file.get_slice(key).get_shape()[0]
            if rows != base.get_input_embeddings().weight.shape[0]:
                base.resize_token_embeddings(rows, mean_resizing=False)
    head = base.get_output_embeddings()
    file_of_export = exported / "config.json"
    if head is not None and head.weight is base.get_input_embeddings().weight and file_of_export.is_file():
        if not _is_tied(
            json.loads(file_of_export.read_text(encoding="utf-8"))
        ):  # PEFT would merge into the shared weight
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
    given = job.get("adapter_config") if adapter == Path(job["adapter"]) else None
    config = PeftConfig.from_peft_type(**given) if given else None
    model = PeftModel.from_pretrained(base, adapter, config=config, local_files_only=True)
    stored = [file.get_tensor(key) for key in file.keys() if ".lora_" in key]  # noqa: SIM118
    loaded = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    one, two = (sum(int(tensor.count_nonzero()) for tensor in tensors) for tensors in (stored, loaded))
    if two < one:  # PEFT drops without a word what it does not know, such as experts of some models one by one
        raise ValueError(f"PEFT loads {two:,} of the adapter's {one:,} numbers")
    return model.to(device).eval()


def _is_tied(config: Json) -> bool:
    text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))


# --- tensors ----------------------------------------------------------------------------------------------------------


def compare_tensors(
    reference: Model, stored: Json, exported: Path, computed: torch.dtype
) -> tuple[Json, dict[str, float]]:
    """Compare the exported tensors with the reference's, whose layers PEFT merges one at a time, and forget those. Also
    the u of each parameter that the export rounds, by its name in the model: those that the adapter changes, and
    float32 weights that become narrower. Of several tensors that are one parameter, the largest u.

    Args:
        stored: a fully trained model's tensors in their files, where they have the dtype that they were trained in.
        computed: the dtype that the models compute in, which the export is loaded in.
    """
    where = open_tensors(exported)
    wrong: list[str] = []
    rounded: dict[str, float] = {}
    changed = 0
    seen: set[str] = set()
    shared: set[int] = set()
    plain = _plain(reference)
    for parameter, values, merged in _merged_tensors(reference):
        for name, tensor in _in_files(plain, parameter, values, where):
            if name not in where:
                if values.data_ptr() not in shared:
                    wrong.append(f"{name} is missing")
                continue
            shared.add(values.data_ptr())
            seen.add(name)
            own = where[name].get_tensor(name).to(tensor.device)
            whole = (stored[name].get_tensor(name).to(tensor.device) if name in stored else tensor.detach()).float()
            changed += merged
            if merged or not torch.equal(own.float(), whole):
                unit = _relative_rounding(whole, own.dtype if own.dtype in DROPPED_BITS else computed)
                rounded[parameter] = max(unit, rounded.get(parameter, 0.0))
            if why := tensor_difference(name, own, whole, merged=merged):
                wrong.append(f"{name} {why}")
    unknown = sorted(set(where) - seen)
    return {"compared": len(seen), "changed": changed, "not_compared": unknown, "wrong": wrong}, rounded


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


def _relative_rounding(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """The u of a rounding: see the top of this file."""
    if dtype not in DROPPED_BITS:
        return 2.0 ** -SIGNIFICANT_BITS[dtype]
    unit = _spacing(exact, dtype)
    above = (exact.abs() / unit).frac()
    share = float((above * (1 - above) * unit**2).sum() / (unit**2).sum())
    return math.sqrt(3 * share) * 2.0 ** (1 - SIGNIFICANT_BITS[dtype])


def _compare_files(adapter: Path, exported: Path) -> Json:
    """Compare the tensors of two adapter files bit by bit."""
    from safetensors.torch import load_file

    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, exported))
    wrong = [f"{name} is missing" for name in sorted(one.keys() ^ two.keys())]
    wrong += [
        f"{name} is not equal to the original" for name in one if name in two and not torch.equal(one[name], two[name])
    ]
    return {"compared": len(one.keys() & two.keys()), "changed": 0, "not_compared": [], "wrong": wrong}


# --- logits and answers -----------------------------------------------------------------------------------------------


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


def _logits(model: Model, ids: list[int], choices: Choices | None = None) -> torch.Tensor:
    """(tokens, vocabulary), float32 on the CPU."""
    given = torch.tensor([ids], device=model.device)
    with choices or contextlib.nullcontext():
        found = model(input_ids=given, attention_mask=torch.ones_like(given), use_cache=False)
    return found.logits[0].float().cpu()


class Choices(TorchFunctionMode):
    """The experts that routers choose (`topk`) in a forward pass: written down, or those of another pass, in order.

    experts: of each call, on the CPU
    scores:  that they were chosen by, of each call, on the CPU
    count:   experts that were chosen
    others:  of them, those that this model would not have chosen
    """

    def __init__(self, experts: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.experts = experts or []
        self.scores: list[torch.Tensor] = []
        self._next = iter(self.experts) if experts is not None else None
        self.count = self.others = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Json | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        own, scores = found[1], args[0] if args else (kwargs or {})["input"]
        self.scores.append(scores.detach().float().cpu().clone())
        if self._next is None:
            self.experts.append(own.cpu())
            return found
        self.count += own.numel()
        given = next(self._next, own[..., :0]).to(own.device)
        if given.shape != own.shape:  # another kind of router
            self.others += own.numel()
            return found
        dim = (kwargs or {}).get("dim", args[2] if len(args) > 2 else -1)
        one, two = (chosen.movedim(dim, -1) for chosen in (given, own))
        self.others += int((one.unsqueeze(-1) != two.unsqueeze(-2)).all(-1).sum())
        return torch.return_types.topk((scores.gather(dim, given), given))

    def other_experts(self, noisy: Choices) -> list[torch.Tensor]:
        """The experts with the next one in place of the last, wherever FACTOR times the noise in the scores may make
        that of it."""
        found = []
        for experts, scores, other in zip(self.experts, self.scores, noisy.scores, strict=True):
            count = experts.shape[-1]
            best = scores.topk(min(count + 1, scores.shape[-1]))
            if count < scores.shape[-1] and torch.equal(best.indices[..., :count].sort().values, experts.sort().values):
                noise = (scores - other).abs().nan_to_num(posinf=0.0).max()
                near = best.values[..., count - 1] - best.values[..., count] <= FACTOR * noise
                experts = best.indices[..., :count].clone()
                experts[..., -1] = torch.where(near, best.indices[..., count], experts[..., -1])
            found.append(experts)
        return found


def _largest_difference(one: list[torch.Tensor], two: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))


def _add_roundings(model: Model, rounded: dict[str, float], computed: torch.dtype) -> None:
    """Disturb the model as roundings of weights, by their u in `rounded`, and of each layer's output to `computed` do:
    see the top of this file."""
    generator = torch.Generator(device=model.device).manual_seed(1)
    of_outputs = 2.0 ** -SIGNIFICANT_BITS[computed]

    def random(like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, generator=generator, device=like.device).mul_(2).sub_(1).to(like.dtype)

    for name, parameter in model.named_parameters():
        if name in rounded:
            parameter.mul_(1 + rounded[name] * random(parameter))

    def hook(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> object:
        if not isinstance(output, torch.Tensor):
            return output
        size = max(of_outputs, 2.0**-24 * math.sqrt(inputs[0].shape[-1]))
        return output + size * output.float().square().mean().sqrt().to(output.dtype) * random(output)

    for layer in model.modules():
        stacked = any(parameter.dim() > 2 for parameter in layer.parameters(recurse=False))  # the experts of one layer
        if stacked or isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(hook)


def compare_answers(
    wanted: list[int],
    own: list[int],
    logits: torch.Tensor,
    prompt: int,
    near: float,
    tokenizer: Any,
) -> Json:
    """The two answers to a prompt, and whether they are equal, differ, or differ from a tie on."""
    texts = {"expected": tokenizer.decode(wanted), "found": tokenizer.decode(own), "tokens": len(wanted)}
    place = next((n for n, pair in enumerate(zip(wanted, own, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return texts | {"outcome": "equal" if len(wanted) == len(own) else "differs"}
    row = logits[prompt + place - 1]
    margin = float(row[wanted[place]] - row[own[place]])
    return texts | {"outcome": "tie" if margin <= near else "differs", "margin": margin}


# --- loss -------------------------------------------------------------------------------------------------------------


def take_rows(rows: list[list[list[int]]], most: int) -> list[tuple[list[int], list[int]]]:
    """As many rows as have `most` tokens, long ones and the last one cut. Left out are those without a supervised token
    then."""
    found = []
    for ids, labels in rows:
        kept = ids[: min(most, ROW_TOKENS)], labels[: min(most, ROW_TOKENS)]
        most -= len(kept[0])
        if any(label != IGNORED for label in kept[1][1:]):
            found.append(kept)
    return found


def token_losses(model: Model, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """The loss of each supervised token, in order."""
    found = [torch.empty(0)]
    for ids, labels in rows:
        wanted = torch.tensor(labels[1:])
        kept = wanted != IGNORED
        found.append(torch.nn.functional.cross_entropy(_logits(model, ids)[:-1][kept], wanted[kept], reduction="none"))
    return torch.cat(found)


def compare_losses(losses: dict[str, torch.Tensor]) -> Json:
    """Mean losses of the base model, the run and the export, and what the last may be above the second."""
    means = {name: float(losses[name].mean()) for name in ("base", "run", "export") if name in losses}
    gained = max(means["base"] - means["run"], 0.0) if "base" in means else 0.0
    noise = float((losses["noisy"] - losses["export"]).abs().mean())
    return means | {"bound": LOST * gained + noise, "tokens": len(losses["run"])}


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _check_gguf(job: Json) -> Json:
    """Compare llama.cpp on the GGUF file with transformers on the folder it was converted from.

    llama.cpp multiplies with activations and a key-value cache in 16 bits, so the roundings are those of float16. Its
    routers cannot be made to choose given experts: what the choices change that roundings of FACTOR times this size may
    change, all of them changed, is added to the bound.
    """
    from transformers import AutoTokenizer

    folder = Path(job["exported"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [_token_ids(tokenizer, text) for text in job["prompts"]]
    found: Json = {"passed": False, "why": "", "factor": FACTOR}
    device, dtype = choose_device(job)
    model = _load_export(job, folder, dtype, device)
    answers = [_generate(model, ids, job["max_new_tokens"]) for ids in prompts]
    asked = [ids + answer for ids, answer in zip(prompts, answers, strict=True)]
    choices = [Choices() for _ in asked]
    wanted = [_logits(model, ids, one) for ids, one in zip(asked, choices, strict=True)]
    unit = 2.0 ** -SIGNIFICANT_BITS[torch.float16]
    matrices = {name: unit for name, parameter in model.named_parameters() if parameter.dim() > 1}
    _add_roundings(model, matrices, torch.float16)
    same = [Choices(one.experts) for one in choices]
    noisy = [_logits(model, ids, one) for ids, one in zip(asked, same, strict=True)]
    others = [Choices(one.other_experts(two)) for one, two in zip(choices, same, strict=True)]
    rerouted = [_logits(model, ids, one) for ids, one in zip(asked, others, strict=True)]
    one, two, three = ([torch.log_softmax(x, -1) for x in logits] for logits in (wanted, noisy, rerouted))
    noise = FACTOR * max(float(_top_differences(a, b).max()) for a, b in zip(one, two, strict=True))
    bounds = [noise + _top_differences(a, b) for a, b in zip(two, three, strict=True)]
    del model
    gc.collect()
    found |= {"device": str(device), "dtype": _dtype_name(dtype)}
    return found | _llama(job, prompts, answers, one, bounds, tokenizer)


def _top_differences(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Largest difference of log-probabilities among the most likely tokens, of each position."""
    top = one.topk(min(GGUF_TOP, one.shape[-1])).indices
    return (one.gather(-1, top) - two.gather(-1, top)).abs().amax(-1)


def _llama(
    job: Json,
    prompts: list[list[int]],
    answers: list[list[int]],
    wanted: list[torch.Tensor],
    bounds: list[torch.Tensor],
    tokenizer: Any,
) -> Json:
    """Generate with llama.cpp and compare tokens and log-probabilities, position by position."""
    import xllamacpp  # pyright: ignore[reportMissingImports]  # an extra

    parameters = xllamacpp.CommonParams()
    parameters.model.path = job["gguf"]
    parameters.n_ctx = 2 * max(len(ids) + len(answer) for ids, answer in zip(prompts, answers, strict=True)) + 64
    parameters.n_parallel, parameters.warmup = 1, False
    server = xllamacpp.Server(parameters)
    largest, bound, outcomes, why = 0.0, 0.0, [], ""
    ends = _stop_tokens(Path(job["exported"]), tokenizer)
    for text, ids, answer, logprobs, limits in zip(job["prompts"], prompts, answers, wanted, bounds, strict=True):
        request = {"n_predict": len(answer), "temperature": 0.0, "n_probs": GGUF_TOP, "cache_prompt": False}
        by_ids = server.handle_completions(request | {"prompt": ids})
        by_text = server.handle_completions(request | {"prompt": text, "n_predict": 1})
        if error := by_ids.get("error") or by_text.get("error"):
            return {"passed": False, "why": f"llama.cpp cannot read the prompt {text!r}: {error.get('message')}"}
        read = by_text["usage"]["prompt_tokens"]
        if read != len(ids):
            why = why or f"llama.cpp reads a prompt as {read} tokens instead of {len(ids)}"
        own: list[int] = []
        for one in by_ids["choices"][0]["logprobs"]["content"]:
            own += _unreported(answer[len(own) :], one["id"], answer[: len(own)], tokenizer)
            place = len(own)
            row, limit = logprobs[len(ids) + place - 1], float(limits[len(ids) + place - 1])
            for top in one["top_logprobs"]:
                if top["logprob"] is not None and math.isfinite(top["logprob"]):
                    difference = abs(float(row[top["id"]]) - top["logprob"])
                    largest, bound = max((largest, bound), (difference, limit), key=_excess)
            own.append(one["id"])
            if place >= len(answer) or one["id"] != answer[place]:
                break
        if own == answer[: len(own)]:
            own += _unreported(answer[len(own) :], None, answer[: len(own)], tokenizer)
        if len(own) < len(answer) and ends & {*own[-1:], answer[len(own)]}:
            answer = answer[: len(own)]  # llama.cpp stops at an end token, with or without it
        near = 2 * float(limits[len(ids) + len(own) - 2])
        outcomes.append(compare_answers(answer, own, logprobs, len(ids), near, tokenizer))
    if not why and not largest <= bound:
        why = f"log-probabilities differ by {largest:.3g}, and rounding explains {bound:.3g}"
    if not why and any(one["outcome"] == "differs" for one in outcomes):
        why = "an answer differs"
    return {
        "passed": not why,
        "why": why,
        "logits": {"difference": largest, "bound": bound},
        "answers": outcomes,
        "library": f"xllamacpp {getattr(xllamacpp, '__version__', '')}".strip(),
    }


def _unreported(expected: list[int], reported: int | None, before: list[int], tokenizer: Any) -> list[int]:
    """The next tokens that llama.cpp leaves out of its report, because the text ends within a character after them."""
    found: list[int] = []
    for token in expected:
        if token == reported or not tokenizer.decode([*before, *found, token]).endswith("\ufffd"):
            break
        found.append(token)
    return found


def _excess(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] if pair[1] else 0.0


def _stop_tokens(folder: Path, tokenizer: Any) -> set[int]:
    """Tokens that end an answer."""
    file = folder / "generation_config.json"
    given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return {tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])} - {None}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _peak_host() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    raise SystemExit(main())
