"""What is compared: a cell is one model, one way to train it and one kind of rows; a variant is one stack in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.models import FAMILIES, SHAPES

SIZES = {
    "1.2b": "llama-1.2b",
    "8b": "llama-8b",
    "8b-long": "llama-8b-long",
    "1m": "llama-1m",
    "moe": "qwen3-moe-16",
    "moe48": "qwen3-moe-30b",
    "moe4": "qwen3-moe-4",
    "1m-moe": "qwen3-moe-1m",
} | {name: name for name in FAMILIES}
METHODS = ("lora", "qlora", "full")
LONG = {str(tokens): tokens for tokens in (32768, 65536, 131072, 262144, 327680)}  # of documents that fill their rows
# Tokens of a document; "own" are the rows of --train as they are.
LONGEST = {"real": 2048, "2048": 2048, "4096": 4096, "16384": 16384, "short": 64, "own": 512} | LONG
CELLS = [
    *(f"1.2b {method} {lengths}" for method in METHODS for lengths in ("real", "2048", "4096", "16384")),
    *(f"8b {method} {lengths}" for method in ("lora", "qlora") for lengths in ("real", "2048", "4096", "16384")),
    *(f"{name} lora own" for name in FAMILIES),
]


@dataclass(frozen=True)
class Setting:
    """Rows (or packs) of a micro-batch, tokens of each, micro-batches of a step, and checkpointing."""

    batch: int
    length: int
    accumulation: int = 1
    checkpointing: Any = False


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One stack in a cell."""

    stack: str  # ours, unsloth or trl
    settings: list[Setting]  # tried in turn until one is slower or does not fit; the fastest is measured
    fixed: bool = False  # trains rows of exactly 2,048 tokens whatever the cell's are: the static ceiling
    packing: bool = False
    before: bool = False  # an earlier version of this package
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model, method and kind of rows."""

    name: str
    size: str
    method: str
    lengths: str

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return LONGEST[self.lengths]


def cell(name: str) -> Cell:
    """The cell of a name such as "1.2b lora real". Raises ValueError for another."""
    size, method, lengths = (name.split() + ["", "", ""])[:3]
    if size not in SIZES or method not in METHODS or lengths not in LONGEST:
        raise ValueError(f"cell {name!r}: SIZE METHOD LENGTHS, of {list(SIZES)}, {METHODS} and {list(LONGEST)}")
    return Cell(name=name, size=size, method=method, lengths=lengths)


def variants(cell: Cell, *, before: bool = False) -> dict[str, Variant]:
    """The stacks of a cell by name, each with the settings to choose from; with `before`, this package's variants also
    in an earlier version.

    "Documented" is what the stack's own documentation shows: batch 2, accumulation 4 and Unsloth's checkpointing;
    TRL's defaults. They are measured as they are.
    """
    longest, short = cell.longest, cell.lengths == "short"
    if cell.lengths in LONG:
        return long_variants(cell)
    if cell.lengths == "own":  # packed beside padded, about as many tokens in each
        scale = 1 if cell.size.endswith("1m") else 8
        pack, padded = Setting(1, 2048 * scale), Setting(12 * scale, 512)
        return {
            "ours": Variant(stack="ours", settings=[pack], packing=True),
            "ours_padded": Variant(stack="ours", settings=[padded]),
            "unsloth_packed": Variant(stack="unsloth", settings=[pack], packing=True),
            "unsloth_padded": Variant(stack="unsloth", settings=[padded]),
        }
    pack = 128 if short else 8192 if cell.size == "8b" and longest <= 8192 else 16384
    rows = max(1, pack // longest)
    same = [Setting(batch, longest) for batch in sorted({max(1, rows // 2), rows, rows * 2})]
    packs = [Setting(1, pack), Setting(2, pack)] if cell.size != "moe48" else [Setting(1, pack, 1, True)]
    checkpointed = [Setting(batch, longest, 1, True) for batch in (16, 32, 64)]
    found = {
        "ours": Variant(stack="ours", settings=packs, packing=True),
        "unsloth_fixed": Variant(stack="unsloth", settings=same, fixed=cell.lengths == "real"),
        "trl_liger": Variant(stack="trl", settings=same, options={"liger": True}),
    }
    found["ours_flash_2"] = Variant(stack="ours", settings=packs, packing=True, options={"flash_2": True})
    words: dict[str, Any] = {"words": ["--model.backend", "transformers"]}
    if "moe" in cell.size or cell.size in FAMILIES:
        found["ours_transformers"] = Variant(stack="ours", settings=packs, packing=True, options=words)
    if cell.method == "lora":
        found["ours_fp8"] = Variant(stack="ours", settings=packs, packing=True, options={"fp8": True})
    if cell.lengths in ("real", "short"):
        padded = [Setting(batch, longest) for batch in ((2, 4) if short else (16, 32, 64))]
        same_packs = [Setting(rows, longest), *packs]
        documented = [Setting(2, longest, 4, "unsloth")]
        found |= {
            "ours_padded": Variant(stack="ours", settings=padded),
            "unsloth_packed": Variant(stack="unsloth", settings=same_packs, packing=True),
            "unsloth_padded": Variant(stack="unsloth", settings=padded),
            "unsloth_documented": Variant(stack="unsloth", settings=documented),
            "trl_liger": Variant(
                stack="trl", settings=[Setting(2, longest), *padded[:2]] if short else
                [Setting(8, longest), *padded[:2]], options={"liger": True},
            ),
            "trl_documented": Variant(stack="trl", settings=[Setting(8, longest, 1, True)]),
        }  # fmt: skip
        if cell.size in FAMILIES:
            found["ours_transformers_padded"] = Variant(stack="ours", settings=padded, options=words)
    if "moe" in cell.size:
        for name, one in found.items():
            if "liger" in one.options:  # PEFT's layers around experts lack what Liger's experts read
                options = {"liger": True, "liger_config": {"swiglu": False}}
                found[name] = replace(one, options=options, settings=one.settings if short else checkpointed)
    if before:
        own = {name: variant for name, variant in found.items() if variant.stack == "ours"}
        found |= {name.replace("ours", "ours_before"): replace(variant, before=True) for name, variant in own.items()}
    return found


def long_variants(cell: Cell) -> dict[str, Variant]:
    """The stacks of a cell with one document per row and step that needs every measure to fit one GPU."""
    tiled = ["--model.tiled_mlp", "true"]
    transformers = ["--model.backend", "transformers", *tiled]

    def rows(checkpointing: Any) -> list[Setting]:
        return [Setting(1, cell.longest, 1, checkpointing)]

    return {
        "ours": Variant(stack="ours", settings=rows("offload"), packing=True, options={"words": transformers}),
        "ours_unsloth": Variant(stack="ours", settings=rows("unsloth"), packing=True, options={"words": tiled}),
        "ours_selective": Variant(
            stack="ours", settings=rows("selective"), packing=True, options={"words": transformers}
        ),
        "ours_recomputed": Variant(stack="ours", settings=rows(True), packing=True, options={"words": transformers}),
        "unsloth": Variant(stack="unsloth", settings=rows("unsloth"), options={"tiled_mlp": True}),
    }


def matmul_parameters(size: str) -> int:
    """Weights that multiply every token: the decoder's linear layers and the output head."""
    shape = SHAPES[SIZES[size]]
    hidden, head = shape["hidden_size"], shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    mlp = 3 * hidden * shape["intermediate_size"]
    if experts := shape.get("num_experts"):
        mlp = 3 * hidden * shape["moe_intermediate_size"] * shape["num_experts_per_tok"] + hidden * experts
    layer = 2 * hidden * queries + 2 * hidden * keys + mlp
    return shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]


def flops_per_token(cell: Cell, method: str, mean_square_over_mean: float) -> float | None:
    """Floating-point operations of a token, forward and backward, by the "model FLOPs" of PaLM (arXiv 2204.02311,
    appendix B): frozen weights have no gradient of their own, recomputation and adapters do not count. None for
    the sizes of FAMILIES.

    mean_square_over_mean: sum of the documents' squared lengths over the sum of their lengths, in tokens.
    """
    shape = SHAPES[SIZES[cell.size]]
    if cell.size in FAMILIES:
        return None
    linear = (6 if method == "full" else 4) * matmul_parameters(cell.size)
    heads = shape["num_attention_heads"]
    width = heads * shape.get("head_dim", shape["hidden_size"] // heads)
    return linear + 6.0 * shape["num_hidden_layers"] * width * mean_square_over_mean
