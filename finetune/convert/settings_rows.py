"""How the rows are read and which tokens are supervised: the settings `data.format`, columns and markers."""

from __future__ import annotations

import ast
import re
from typing import Any

from finetune.convert.names import root, target_names
from finetune.convert.read import Refusal
from finetune.convert.roles import Plan, refuse_list_of_one
from finetune.convert.values import Described, Settings, Unknown, known, short


def _tokenizes(plan: Plan) -> bool:
    """Whether the notebook makes the token ids of its rows itself: a column `input_ids`, or rows that are what the
    tokenizer returns."""
    for place in plan.hooks["dataset"] + plan.hooks["module"]:
        for node in ast.walk(plan.program.statements[place].node):
            if isinstance(node, ast.Dict) and any(getattr(key, "value", 0) == "input_ids" for key in node.keys):
                return True
            if isinstance(node, ast.FunctionDef) and _returns_tokens(plan, node):
                return True
            if isinstance(node, ast.Lambda) and _is_tokens(plan, node.body, set()):
                return True
    return False


def _returns_tokens(plan: Plan, function: ast.FunctionDef) -> bool:
    """Whether a function returns what the tokenizer returned, possibly with further keys set."""
    nodes = list(ast.walk(function))
    tokens: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_tokens(plan, node.value, tokens):
            tokens.update(name for target in node.targets for name in target_names(target))
    return any(isinstance(n, ast.Return) and n.value is not None and _is_tokens(plan, n.value, tokens) for n in nodes)


def _is_tokens(plan: Plan, value: ast.expr, tokens: set[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in tokens
    if isinstance(value, ast.Dict):  # {**tokens, "labels": ...}
        spread = [item for key, item in zip(value.keys, value.values, strict=True) if key is None]
        return any(_is_tokens(plan, item, tokens) for item in spread)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Name):
        return value.func.id in plan.tokenizers
    if isinstance(value.func, ast.Attribute) and value.func.attr in ("encode_plus", "batch_encode_plus", "__call__"):
        return root(value.func) in plan.tokenizers
    return False


def refuse_rows(what: Described, plan: Plan) -> None:
    """Refuse infinite streams, rows packed by TRL, and several held-out sets."""
    if isinstance(what.trainer.get("eval_dataset"), dict):
        raise Refusal("R4", "eval_dataset has several sets; pass one, because there is one held-out loss")
    train = what.trainer.get("train_dataset")
    if isinstance(train, Unknown) and train.name.endswith("ConstantLengthDataset"):
        raise Refusal("R4", "ConstantLengthDataset packs the rows; pass the rows to the trainer, with packing=True")
    if what.api == "unsloth" and not _OF_TEXT.match(str(what.loader.get("model_name"))):
        _refuse_default_of_processors(plan)
    text = "\n".join(plan.program.statements[place].source for place in plan.hooks["dataset"])
    if re.search(r"streaming\s*=\s*True", text) and not re.search(r"\.take\(|islice\(|\bDataset\.from_", text):
        raise Refusal(
            "R4", "the rows are a stream, but all rows are prepared before training; limit them with .take(n)"
        )


# Families of models for text only, for which Unsloth loads a tokenizer.
_OF_TEXT = re.compile(
    r"(?!.*(vl|vision|omni|audio|qwen3\.5|multimodal))(.*/)?(\w+-)?"
    r"(code)?(llama-?2|llama-3|tinyllama|qwen-?[123]|tiny_?qwen|mistral-7b|mixtral|phi-?[234]|gemma-(2|7)b|gemma-2|gemma-3-(270m|1b)"
    r"|deepseek-r1|smollm|gpt-oss|zephyr|falcon|granite|lfm2)",
    re.IGNORECASE,
)


def _refuse_default_of_processors(plan: Plan) -> None:
    """Refuse (R4) rows made with `tokenizer.apply_chat_template(messages)`: of a model for images too, such as Gemma 3,
    Unsloth loads a processor, which returns text. The script has a tokenizer, which returns token ids."""
    for place in plan.hooks["dataset"] + plan.hooks["module"]:
        statement = plan.program.statements[place]
        for call in ast.walk(statement.node):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            chosen = {item.arg for item in call.keywords} & {"tokenize", "return_tensors", "return_dict", None}
            if call.func.attr == "apply_chat_template" and root(call.func) not in plan.program.imports and not chosen:
                raise Refusal(
                    "R4",
                    "apply_chat_template() without `tokenize` returns text if Unsloth loads a processor, and token ids"
                    " if it loads a tokenizer; pass tokenize=False or tokenize=True",
                    statement.cell,
                )


def set_format(settings: Settings, what: Described, plan: Plan, text_field: Any) -> None:
    """Which columns are read and supervised. What is not known here is decided by the rows, in the library's order:
    TRL takes prompt and completion first, then messages, then the text field; Unsloth takes the text before messages.
    """
    columns = _columns(plan)
    tokenizes = _tokenizes(plan)
    if plan.formatting is not None:
        if tokenizes:
            raise Refusal("R4", "the trainer has a formatting_func, but the rows are token ids; leave one of them out")
        refuse_list_of_one(plan.program, plan.formatting)
        settings.set("data.format", "text")
        plan.read_first = what.config.get("dataset_text_field", "text") if what.api == "unsloth" else None
        if not isinstance(plan.read_first, str | None):
            raise Refusal("R4", f"dataset_text_field is not a text ({plan.read_first}); write the column's name")
        if plan.read_first is not None:
            settings.notes.append(formatting_is_ignored(plan.read_first))
        return
    if tokenizes:
        settings.notes.append("the notebook tokenizes its rows itself: token ids and labels are taken as they are")
    elif _has_completions(plan, columns) and not what.former_text_field:
        settings.set("data.format", "prompt_completion")
    elif what.api == "unsloth" and _unsloth_reads_text(what, columns, text_field):
        settings.set("data.format", "text")
        if text_field not in (None, "text"):
            settings.set("data.columns", {"text": text_field})
        sources = [plan.program.statements[place].source for place in plan.hooks["dataset"] + plan.hooks["module"]]
        if not re.search(r"eos_token|EOS|apply_chat_template", "\n".join(sources)):
            settings.notes.append("a text that does not end with EOS gets one, as in TRL; Unsloth's trainer adds none")
        return
    if what.former_text_field and not tokenizes:  # which took this column and no other
        settings.set("data.format", "text")
        if text_field not in (None, "text"):
            settings.set("data.columns", {"text": text_field})
        return
    if text_field not in (None, "text"):
        settings.set("data.dataset_text_field", text_field)
    settings.set("data.assistant_only_loss", bool(what.config.get("assistant_only_loss")))
    if (completion := what.config.get("completion_only_loss")) is not None:
        settings.set("data.completion_only_loss", bool(completion))
    if not columns:
        settings.notes.append(
            "the columns of the data set are unknown until it is loaded; the run reads them in TRL's order, and prints"
            " how. A column `system` becomes the system message, which TRL does not read"
        )


def formatting_is_ignored(field: str) -> str:
    """The note on a formatting_func that is used only if the rows have no text field."""
    return f"formatting_func is used only if the rows have no column {field!r}, as in Unsloth's trainer"


def _has_completions(plan: Plan, columns: set[str]) -> bool:
    """Whether the rows surely have prompts and completions: the notebook makes both, and removes neither."""
    if not {"prompt", "completion"} <= columns or columns & {"messages", "conversations"}:
        return False
    text = "\n".join(plan.program.statements[place].source for place in plan.hooks["dataset"])
    return "text" not in columns or not re.search(
        r"column_names|(?m:^)(?>.*?remove_columns\W).*\b(?:prompt|completion)\b", text
    )


def _unsloth_reads_text(what: Described, columns: set[str], text_field: Any) -> bool:
    """Whether Unsloth's trainer reads the text field of rows with these columns."""
    if what.config.get("assistant_only_loss"):
        return False
    return (
        text_field is not None or "text" in columns
        if columns & {"text"}
        else (isinstance(text_field, str) and (text_field != "text" or not columns & {"messages", "prompt"}))
    )


def _columns(plan: Plan) -> set[str]:
    """Columns that the data preparation creates: keys of dicts, and renamed or added columns."""
    found: set[str] = set()
    for place in plan.hooks["dataset"] + plan.hooks["module"]:
        for node in ast.walk(plan.program.statements[place].node):
            if isinstance(node, ast.Dict):
                found |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr.startswith(("rename", "add_column", "select_columns"))
            ):
                found |= {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute):
                target = node.targets[0]
                if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                    found.add(str(target.slice.value))
                if isinstance(target, ast.Attribute) and target.attr == "name" and isinstance(node.value, ast.Constant):
                    found.add(str(node.value.value))
    return found & {"text", "messages", "conversations", "prompt", "completion", "instruction", "output"}


def set_responses(settings: Settings, what: Described, plan: Plan) -> None:
    given = what.responses
    collator = what.trainer.get("data_collator")
    if given is None and isinstance(collator, Unknown) and collator.name.endswith("DataCollatorForCompletionOnlyLM"):
        kwargs = known(collator.item["kwargs"])
        args = known(collator.item["args"])
        given = {
            "response_part": kwargs.get("response_template", args[0] if args else None),
            "instruction_part": kwargs.get(
                "instruction_template", args[1] if len(args) > 1 and isinstance(args[1], str) else None
            ),
        }
    if given is None:
        return
    if what.responses is None and not isinstance(given["response_part"], str | None):
        raise Refusal(
            "R4",
            f"DataCollatorForCompletionOnlyLM is given token ids ({short(given['response_part'])}); pass the template"
            ' as text: response_template="..."',
            plan.program.statements[plan.key["trainer"]].cell,
        )
    extra = [key for key in ("mask_out_tokens",) if given.get(key)]
    if extra:
        raise Refusal("R4", f"train_on_responses_only: {extra[0]} is not supported")
    if given.get("last_response_only"):
        settings.set("data.last_turn_only", True)
    instruction, response = given.get("instruction_part"), given.get("response_part")
    if response is None and (what.responses is None or instruction is not None):
        raise Refusal("R4", "the marker that starts a response is missing; set response_part")
    if response is None:
        response = "auto"
        settings.comments["data.response_part"] = "both markers are derived from the chat template, as in the notebook"
    if settings.sections["data"].get("format") not in (None, "text"):
        raise Refusal("R4", "train_on_responses_only needs rows of text")
    settings.set("data.format", "text")
    settings.sections["data"].pop("assistant_only_loss", None)
    if instruction is not None:
        settings.set("data.instruction_part", instruction)
    settings.set("data.response_part", response)
