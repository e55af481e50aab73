"""`finetune chat` on a real run, against plain transformers: answers, stop tokens, conversations, refusals."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune import chat, train
from finetune.chat import load as loading
from finetune.engine.checkpoint import run_artifacts
from finetune.errors import UserError
from tests.helpers import tiny
from tests.helpers.runs import in_this_process

# Not the template of the base model: what was trained with is saved, and is what chat uses.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ': ' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)
PROMPTS = ["the cat runs", "sing", "seven small green birds that sing while rain falls over the hill and the cat sees"]
LONGEST = 12


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="module")
def run(shared: Path, tiny_model: Path, tiny_data: Path) -> Path:
    """A finished run of 4 steps with checkpoints at 2 and 4. Its adapter is then made large, so that answers differ."""
    out = shared / "out"
    (shared / "own.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as monkeypatch, in_this_process(monkeypatch, shared):
        arguments = ["--model.model_name_or_path", str(tiny_model), "--model.backend", "transformers"]
        arguments += ["--model.chat_template", str(shared / "own.jinja"), "--data.system_prompt", "Be brief."]
        arguments += ["--data.train_file", str(tiny_data / "train.jsonl"), "--data.num_proc", "1"]
        arguments += ["--training.output_dir", str(out), "--training.global_batch_size", "4"]
        arguments += ["--training.max_steps", "4", "--training.save_steps", "2"]
        assert train.main(arguments) == 0
    weights = load_file(out / "adapter_model.safetensors")
    torch.manual_seed(1)
    save_file(
        {name: torch.randn_like(tensor) * 0.3 for name, tensor in weights.items()},
        out / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    return out


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when it is imported
    with in_this_process(monkeypatch, tmp_path):
        yield


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\r\n")
    return file


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def reference(base: Path, adapter: Path | None, messages: list[dict[str, str]], template: str = TEMPLATE) -> str:
    """A greedy answer of plain transformers, with the adapter merged into the weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    ids = tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, do_sample=False, max_new_tokens=LONGEST, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]


def answered(tmp_path: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a call that must succeed."""
    target = tmp_path / "answers.json"
    longest = ("--max-new-tokens", str(LONGEST)) if "--max-new-tokens" not in arguments else ()
    assert chat.main([str(folder), "--json", str(target), *longest, *arguments]) == 0
    return json.loads(target.read_text())


def test_answers_equal_those_of_the_merged_model(run: Path, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    """Greedy, of the trained and of the base model; together and one at a time; with the system message of the run."""
    together = answered(tmp_path, run, "--prompts", str(prompts), "--compare", "--batch-size", "3")
    alone = answered(tmp_path, run, "--prompts", str(prompts), "--compare", "--batch-size", "1")
    assert together["answers"] == alone["answers"]
    assert [one["prompt"] for one in together["answers"]] == PROMPTS
    assert together["system"] == "Be brief." and together["sampling"] is None
    for one in together["answers"]:
        assert one["answer"]["text"] == reference(tiny_model, run, asked(one["prompt"]))
        assert one["base"]["text"] == reference(tiny_model, None, asked(one["prompt"]))
        assert one["answer"]["text"] != one["base"]["text"]
    assert len({one["answer"]["text"] for one in together["answers"]}) == len(PROMPTS)


def test_an_adapter_that_trains_biases_is_compared_with_the_untouched_base(
    copy: Path, tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    """PEFT cannot switch such an adapter off: the base model is loaded beside it."""
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"bias": "lora_only"}))
    found = answered(tmp_path, copy, "--prompts", str(prompts), "--compare")["answers"][0]
    assert found["base"]["text"] == reference(tiny_model, None, asked(PROMPTS[0]))
    assert found["answer"]["text"] == reference(tiny_model, copy, asked(PROMPTS[0]))


def test_a_full_model_is_compared_with_the_model_it_was_trained_from(
    tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    after = tiny.make_model(tmp_path / "full", seed=3)
    record = {"status": "done", "dtype": "float32", "config": {"model": {"model_name_or_path": str(tiny_model)}}}
    (after / "run.json").write_text(json.dumps(record))
    found = answered(tmp_path, after, "--prompts", str(prompts), "--compare")
    messages = [{"role": "user", "content": PROMPTS[0]}]
    assert found["kind"] == "model" and found["system"] is None
    assert found["answers"][0]["answer"]["text"] == reference(after, None, messages, tiny.CHAT_TEMPLATE)
    assert found["answers"][0]["base"]["text"] == reference(tiny_model, None, messages, tiny.CHAT_TEMPLATE)


def test_a_prompt_without_template_is_continued_as_it_is(run: Path, tiny_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "raw.txt"
    prompts.write_text("the cat ")
    found = answered(tmp_path, run, "--prompts", str(prompts), "--raw")
    assert found["answers"][0]["answer"]["text"] == reference(
        tiny_model, run, [{"role": "user", "content": "the cat "}], "{{ messages[0]['content'] }}"
    )
    assert found["chat_template"] is False and found["system"] is None


# --- where an answer ends ---------------------------------------------------------------------------------------------


def speaker(folder: Path, **manner: Any) -> Any:
    from finetune.chat import load
    from finetune.chat.generation import Manner, Speaker

    found = run_artifacts.find_trained_model(folder)
    given = {"max_new_tokens": LONGEST, "temperature": None, "greedy": True, "seed": 1, **manner}
    return Speaker(load.load(found), found, Manner(**given), system=None, raw=False)


def test_an_answer_ends_at_every_stop_token(run: Path, copy: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Of the generation config's list, of the tokenizer, and of the template's turns."""
    from transformers import AutoTokenizer

    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    whole = speaker(run)
    (ids,) = [whole.encode(whole.opening(PROMPTS[0]))]
    from finetune.engine.model.generation import complete

    (tokens,) = complete(whole.loaded.model, [ids], whole.settings(LONGEST))
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    config = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [stop, 1]}))
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.eos_token = "<|pad|>"  # no longer what ends a turn
    tokenizer.save_pretrained(copy)
    adapter = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(adapter | {"base_model_name_or_path": str(base)}))
    ended = speaker(copy)
    assert set(ended.stops) == {stop, 1, *tokenizer.convert_tokens_to_ids(["<|pad|>", "<|im_end|>"])}
    (answer,) = ended.answer([ids])
    until = tokens[: tokens.index(stop)]
    assert answer.text == tokenizer.decode([*until, stop], skip_special_tokens=True)
    assert (answer.tokens, answer.finished) == (len(until) + 1, True)


def test_a_turn_that_ends_in_plain_text(copy: Path) -> None:
    """A tokenizer without a token for the end of a turn: its text ends the answer, in a batch and while streaming."""
    from finetune.chat.repl import Streamer

    whole = speaker(copy)
    ids = [whole.encode(whole.opening(prompt)) for prompt in PROMPTS]
    full = [one.text for one in whole.answer(ids)]
    (copy / "chat_template.jinja").write_text(TEMPLATE.replace("<|im_end|>", "</turn>"))
    found = speaker(copy)
    assert found.stop_string == "</turn>" and found.stops == whole.stops
    found.stop_string = full[0][3:5]
    cut = [one.text for one in found.answer(ids)]
    assert cut == [text.partition(found.stop_string)[0] for text in full]
    shown: list[str] = []
    (answer,) = found.answer([ids[0]], streamer=Streamer(found, shown.append))
    assert answer.finished and shown[-1] == answer.text == full[0][:3]
    assert all(answer.text.startswith(text) for text in shown)


def test_sampling_follows_the_generation_config_and_its_seed(run: Path, prompts: Path, tmp_path: Path) -> None:
    drawn = [
        [one["answer"]["text"] for one in answered(tmp_path, run, "--prompts", str(prompts), *extra)["answers"]]
        for extra in (
            ("--temperature", "2", "--seed", "7"),
            ("--temperature", "2", "--seed", "7"),
            ("--temperature", "2", "--seed", "8"),
            ("--temperature", "0"),
            (),
        )
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3] == drawn[4] != drawn[0]
    talking = speaker(run, greedy=False)
    assert not talking.samples and talking.about.startswith("Greedy")
    talking.loaded.model.generation_config.do_sample = True
    talking.loaded.model.generation_config.top_p = 0.5
    assert talking.samples and "top_p 0.5" in talking.about


# --- a conversation ---------------------------------------------------------------------------------------------------


def test_a_conversation_remembers(
    run: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each side has its own history; what is streamed is the answer; control characters do not reach the terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\nsing\n/clear\nsing\n/exit\nnever\n"))
    turns = answered(tmp_path, run, "--compare")["turns"]
    assert [(turn["conversation"], turn["prompt"]) for turn in turns] == [(1, "the cat"), (1, "sing"), (2, "sing")]
    printed = capsys.readouterr().out
    for side, adapter in (("answer", run), ("base", None)):
        first = reference(tiny_model, adapter, asked("the cat"))
        second = [*asked("the cat"), {"role": "assistant", "content": first}, {"role": "user", "content": "sing"}]
        expected = [first, reference(tiny_model, adapter, second), reference(tiny_model, adapter, asked("sing"))]
        assert [turn[side]["text"] for turn in turns] == expected
        for text in expected:
            shown = "".join(one if ord(one) >= 32 or one in "\n\t" else f"\\x{ord(one):02x}" for one in text)
            assert f"{'base' if side == 'base' else 'trained'}: {shown}\n" in printed
    assert not any(ord(one) < 32 and one not in "\n\t" for one in printed)


def test_a_message_that_is_too_long_is_reported_and_forgotten(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("cat " * 2000 + "\nsing\n"))
    turns = answered(tmp_path, run)["turns"]
    assert [turn["prompt"] for turn in turns] == ["sing"]
    assert "the prompt is too long: " in capsys.readouterr().out


# --- which folder -----------------------------------------------------------------------------------------------------


def test_a_run_that_has_not_finished_stands_for_its_newest_complete_checkpoint(copy: Path) -> None:
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    found = run_artifacts.find_trained_model(copy)
    assert found.folder.name == "checkpoint-4" and "interrupted" in str(found.note) and found.base is not None
    (copy / "checkpoint-4" / "adapter_model.safetensors").unlink()
    assert run_artifacts.find_trained_model(copy).folder.name == "checkpoint-2"
    assert run_artifacts.find_trained_model(copy / "checkpoint-2").note is None
    assert run_artifacts.find_trained_model(copy / "checkpoint-2").base_digest == record["settings"]["base weights"]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def other_base(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    base = tiny.make_model(folder / "other", seed=9)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))


def lost_base(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/lost"}))


def evil_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for a in range(10**9) %}{% endfor %}")


@pytest.mark.parametrize(
    ("name", "spoil", "expected"),
    [
        ("nowhere", lambda folder: None, r"^error: no such folder: .*nowhere\. Give the output_dir"),
        ("run.json", lambda folder: None, r"^error: not a folder: .*run\.json\. Give"),
        ("runs", lambda folder: None, r"^error: not a run: .*runs has no run\.json.*Give the output_dir"),
        (".", lambda f: (f / "run.json").write_text("{"), r"^error: .*run\.json cannot be read: .*Restore it"),
        (".", lambda f: (f / "run.json").write_text("[]"), r"^error: .*run\.json must be a JSON object"),
        (".", lambda f: truncate(f / "adapter_model.safetensors"), r"adapter_model\.safetensors is damaged: it has"),
        (".", lambda f: (f / "adapter_config.json").write_text("{}"), r"no peft_type"),
        (".", lambda f: (f / "tokenizer.json").write_text("{}"), r"^error: the tokenizer cannot be loaded: "),
        (".", other_base, r"weights are not those that .* was trained on\. Give the folder .*--base"),
        (".", lost_base, r"base model of .* is someone/lost: .*HF_HUB_OFFLINE is set\. Give its folder with --base"),
        (".", evil_template, r"chat template .* was stopped"),
        (".", lambda f: (f / "chat_template.jinja").write_text("{{ x.y }}"), r"chat template of .* fails: "),
        ("checkpoint-9", lambda folder: (folder / "checkpoint-9").mkdir(), r"not a complete checkpoint: .*it has no"),
        ("checkpoint-4", lambda f: flip(f / "checkpoint-4/adapter_model.safetensors"), r"does not match its checksum"),
        ("checkpoint-4", lambda f: (f / "checkpoint-4/tokenizer.json").unlink(), r"tokenizer\.json is missing.*check"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_sentence(
    copy: Path, prompts: Path, name: str, spoil: Any, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(copy)
    assert chat.main([str(copy / name), "--prompts", str(prompts)]) == 2
    printed = capsys.readouterr().err
    assert re.search(expected, printed) and printed.count("\n") == 1, printed


def test_a_run_that_saved_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "failed"}))
    with pytest.raises(UserError, match=r"^nothing is saved in .*: the run is failed, without a final model"):
        run_artifacts.find_trained_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "--prompts cannot be read: "),
        (b"", "--prompts has no prompt: "),
        (b" \n\n", "--prompts has no prompt: "),
        (b"good\nbad \xff\n", "not UTF-8: .*, line 2"),
        (("cat " * 2000).encode(), r"--prompts, prompt 1: the prompt is too long: .* has 1,024"),
    ],
)
def test_prompts_that_cannot_be_answered(
    run: Path, tmp_path: Path, content: bytes | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "given.txt"
    if content is not None:
        file.write_bytes(content)
    assert chat.main([str(run), "--prompts", str(file)]) == 2
    printed = capsys.readouterr().err
    assert re.search(expected, printed) and printed.count("\n") == 1, printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--serve", "--compare"], "--serve and --compare"),
        (["--raw", "--system", "x"], "--raw and --system"),
        (["--temperature", "-1"], "expected a number of at least 0"),
        (["--max-new-tokens", "0"], "at least 1"),
        (["--promts", "x"], "Nearest is --prompts"),
    ],
)
def test_options_that_are_wrong(run: Path, arguments: list[str], expected: str, capsys: Any) -> None:
    assert chat.main([str(run), *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_code_of_the_run_s_tokenizer_needs_permission(copy: Path, tmp_path: Path, prompts: Path, capsys: Any) -> None:
    """run.json may say that code was allowed in training; that permits nothing here."""
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    changed = {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "Strange"}
    (copy / "tokenizer_config.json").write_text(json.dumps(config | changed))
    record = json.loads((copy / "run.json").read_text())
    record["config"]["model"]["trust_remote_code"] = True
    (copy / "run.json").write_text(json.dumps(record))
    chat.main([str(copy), "--prompts", str(prompts), "--max-new-tokens", "2"])
    assert not (tmp_path / "ran").exists()


def test_serving_prints_commands_that_a_shell_reads(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's a run"
    shutil.copytree(run, folder)
    found = answered(tmp_path, folder, "--serve")
    export, serve = (shlex.split(line) for line in found["vllm"])
    assert export == ["finetune", "export", str(folder), "--to", "merged", "--out", f"{folder}-merged"]
    assert serve[:3] == ["vllm", "serve", f"{folder}-merged"] and serve[-2:] == ["--max-model-len", "1024"]
    export, server = (shlex.split(line) for line in found["llama.cpp"])
    assert export[3:5] == ["--to", "gguf"] and server[0] == "llama-server"
    assert json.loads(shlex.split(found["ask"])[-1])["model"] == "it's a run"


@pytest.mark.parametrize(
    ("asked_for", "trained_by", "base", "gpu", "expected"),
    [
        ("auto", "unsloth", None, True, "auto"),
        ("auto", "unsloth", "BASE", True, "auto"),
        ("auto", "unsloth", None, False, "transformers"),
        ("auto", "transformers", None, True, "transformers"),
        ("auto", "unsloth", "elsewhere", True, "transformers"),
        ("transformers", "unsloth", None, True, "transformers"),
        ("unsloth", "transformers", None, False, "unsloth"),
    ],
)
def test_which_backend_answers(
    asked_for: str,
    trained_by: str,
    base: str | None,
    gpu: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    adapter = {"base_model_name_or_path": "BASE"}
    found = run_artifacts.TrainedModel(given=tmp_path, folder=tmp_path, adapter=adapter, record={"backend": trained_by})
    assert loading._backend(asked_for, found, base) == expected


def test_unsloth_is_refused_for_what_it_would_not_load(tmp_path: Path) -> None:
    full = run_artifacts.TrainedModel(given=tmp_path, folder=tmp_path, adapter=None)
    assert loading._backend("auto", full, None) == "transformers"
    with pytest.raises(UserError, match="adapters only"):
        loading._backend("unsloth", full, None)
    adapter = {"base_model_name_or_path": "BASE"}
    with pytest.raises(UserError, match=r"names \(BASE\), and --base is elsewhere"):
        loading._backend(
            "unsloth", run_artifacts.TrainedModel(given=tmp_path, folder=tmp_path, adapter=adapter), "elsewhere"
        )


@pytest.mark.unsloth
@pytest.mark.process
@pytest.mark.campaign
def test_unsloth_gives_the_same_answers(run: Path, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    """In a process of its own: Unsloth must be imported before transformers."""
    target = tmp_path / "answers.json"
    words = [sys.executable, "-m", "finetune", "chat", str(run), "--prompts", str(prompts), "--compare"]
    words += ["--backend", "unsloth", "--max-new-tokens", str(LONGEST), "--json", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for one in json.loads(target.read_text())["answers"]:
        assert one["answer"]["text"] == reference(tiny_model, run, asked(one["prompt"]))
        assert one["base"]["text"] == reference(tiny_model, None, asked(one["prompt"]))
