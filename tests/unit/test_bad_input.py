"""Every mistake that a user can make: one clear message, the right exit code, and nothing written."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import launch, tiny

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.make_rows(tmp_path / "train.jsonl", 20)
    return tmp_path


def refused(folder: Path, *arguments: str, code: int = 2, how: str = "1 rank", **extra: str) -> str:
    """Run, and assert that it failed with `code`, without a traceback and without an output folder. Its words."""
    out = folder / "out"
    files = sorted(path for path in folder.rglob("*") if "cache" not in path.parts)
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    done = launch.run(how, [*arguments, "--training.output_dir", str(out)], cache=cache, **extra)
    words = " ".join(done.stdout.split())
    if how != "2 ranks":
        assert done.returncode == code, done.stdout[-4000:]
        assert "Traceback" not in words, done.stdout[-4000:]
    assert done.returncode != 0
    assert words.count("error: ") == 1, words[-2000:]  # one rank speaks, once
    assert sorted(path for path in folder.rglob("*") if "cache" not in path.parts) == files
    assert not list(cache.glob("data/*/*.arrow"))
    return words[words.index("error: ") :]


def data(path: Path, *extra: str) -> list[str]:
    return ["--data.train_file", str(path), "--training.max_steps", "1", *extra]


def model(path: Path) -> list[str]:
    return ["--model.model_name_or_path", str(path)]


def test_three_misspelt_keys_and_a_wrong_type_at_once_without_torch(folder: Path) -> None:
    (folder / "bad.yaml").write_text(
        "model: {model_name_or_path: m}\ndata: {train_file: t.jsonl}\n"
        "training: {learing_rate: 1e-4, max_steps: many}\nlora: {rank: 8}\n"
    )
    words = refused(folder, "--config", str(folder / "bad.yaml"), "--data.max_lenght", "9")
    for hint in ("learning_rate", "lora.r", "data.max_length", "max_steps: many", "bad.yaml:3"):
        assert hint in words, words
    assert "4 problems" in words


def test_configuration_is_refused_before_torch_is_imported(folder: Path) -> None:
    code = (
        "import sys; sys.argv = ['train', '--training.learing_rate', '1']\n"
        "from finetune.train import main\n"
        "code = main()\n"
        "heavy = {'torch', 'transformers', 'trl', 'unsloth', 'datasets', 'accelerate', 'numpy'} & set(sys.modules)\n"
        "assert code == 2 and not heavy, (code, heavy)\n"
    )
    done = subprocess.run(
        [*launch.command("python"), "-c", code],
        capture_output=True,
        text=True,
        env=launch.environment(folder),
        check=False,
    )
    assert done.returncode == 0, done.stderr


# What the file holds, further arguments, what is said.
BROKEN: dict[str, tuple[str | bytes, list[str], list[str]]] = {
    "empty": ("", [], ["is empty"]),
    "torn": ('{"messages": []}\n{"messages": [\n', [], ["torn.jsonl:2"]),
    "no object": ('{"text": 1}\n"just a string"\n', [], ["no object.jsonl:2"]),
    "columns": ('{"id": 1, "body": "x"}\n', [], ["the columns are id, body", "set data.columns: {text: body}."]),
    "no labels": (
        '{"messages": [{"role": "user", "content": "hi"}]}\n',
        [],
        ["none of 1 row", "no_assistant", "no labels.jsonl:1"],
    ),
    "encoding": (b'{"text": "caf\xe9"}\n', [], ["UTF-8"]),
    "mapping": (
        '{"question": "1+1", "answer": "2"}\n',
        ["--data.columns", "{prompt: frage, completion: answer}"],
        ["frage", "question, answer"],
    ),
    "tokenizer": ("{}", ["--model.model_name_or_path", "HALF"], ["its tokenizer cannot be loaded", "lacks files"]),
}
ONE_AFTER_THE_OTHER = """
import json, sys
from finetune import train
for name, words in json.loads(sys.argv[1]).items():
    print("CASE", name, flush=True)
    print("CODE", train.main(words), flush=True)
"""


def test_data_that_cannot_be_used(folder: Path, tiny_model: Path) -> None:
    """One process for all, which imports the libraries once."""
    commands = {}
    half = folder / "half"
    half.mkdir()
    (half / "config.json").write_text('{"model_type": "llama"}')
    for name, (content, extra, _) in BROKEN.items():
        path = folder / f"{name}.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        out = ["--training.output_dir", str(folder / "out")]
        given = [*model(tiny_model), *data(path, *extra), *out]
        commands[name] = [word.replace("HALF", str(half)) for word in given]
    script = folder / "script.py"
    script.write_text(ONE_AFTER_THE_OTHER)
    (folder / "cache").mkdir()
    before = sorted(folder.iterdir())
    done = launch.run("1 rank", [json.dumps(commands)], cache=folder / "cache", script=script)
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout[-4000:]
    said = dict(part.split("\n", 1) for part in done.stdout.split("CASE ")[1:])
    assert said.keys() == BROKEN.keys()
    for name, (_, _, expected) in BROKEN.items():
        words = " ".join(said[name].split())
        assert words.count("error: ") == 1 and words.endswith("CODE 2"), words
        for part in expected:
            assert part in words, words
    assert sorted(folder.iterdir()) == before and not list(folder.glob("cache/data/*/*.arrow"))


def test_data_that_is_not_there(folder: Path, tiny_model: Path) -> None:
    words = refused(folder, *model(tiny_model), *data(folder / "missing.jsonl"))
    assert "missing.jsonl" in words and "does not exist" in words


def test_model_that_is_nowhere(folder: Path) -> None:
    words = refused(folder, *model(Path("no-such-org/no-such-model")), *data(folder / "train.jsonl"))
    assert "no-such-org/no-such-model" in words and "HF_HUB_OFFLINE is set" in words


@pytest.mark.campaign
def test_unsloth_where_it_cannot_run(folder: Path, tiny_model: Path) -> None:
    """Asked for, it is refused; under auto it gives way, and compressed data is read. A process that has not imported
    what Unsloth changes."""
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress((folder / "train.jsonl").read_bytes()))
    given = [*model(tiny_model), *data(path), "--training.output_dir"]
    script = folder / "script.py"
    script.write_text(ONE_AFTER_THE_OTHER)
    commands = json.dumps(
        {
            "unsloth": [*given, str(folder / "refused"), "--model.backend", "unsloth"],
            "auto": [*given, str(folder / "out")],
        }
    )
    done = launch.run("python", [commands], cache=folder, script=script, UNSLOTH_DISABLE_CPU_FALLBACK="1")
    refused, _, trained = " ".join(done.stdout.split()).partition("CODE 2")
    assert refused.count("error: ") == 1 and "Unsloth cannot run here" in refused and "transformers" in refused
    assert trained.endswith("CODE 0"), done.stdout[-4000:]
    assert not (folder / "refused").exists()
    run = launch.read(folder / "out")
    assert run["backend"] == "transformers" and "Unsloth cannot run here" in run["backend_reason"]
    assert run["ledger"]["train"]["rows_kept"] == 20


def test_world_size_that_does_not_divide_the_global_batch(folder: Path, tiny_model: Path) -> None:
    arguments = [*model(tiny_model), *data(folder / "train.jsonl", "--training.global_batch_size", "15")]
    words = refused(folder, *arguments, how="2 ranks")
    assert "global_batch_size 15" in words and "1, 3, 5, 15" in words


def test_output_folder_of_another_run(folder: Path, tiny_model: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "run.json").write_text("{}")
    words = refused(folder, *model(tiny_model), *data(folder / "train.jsonl"))
    assert "holds another run" in words and "resume_from_checkpoint" in words


@pytest.mark.unsloth
@pytest.mark.campaign
def test_adapter_on_top_of_an_adapter_and_another_plan(folder: Path, tiny_model: Path) -> None:
    """Refused; and continued, from the weights it has, where that is asked for. A checkpoint of another plan, too, is
    refused."""
    train = data(
        folder / "train.jsonl", "--logging.generate_samples", "0", "--data.eval_file", str(folder / "train.jsonl")
    )
    first = launch.train("1 rank", [*model(tiny_model), *train], out=folder / "first", cache=folder)
    words = refused(folder, *model(folder / "first"), *train)
    assert "already an adapter" in words and "continue_adapter" in words
    for backend in ("unsloth", "transformers"):
        again = [*model(folder / "first"), *train, "--lora.continue_adapter", "--model.backend", backend]
        second = launch.train("1 rank", again, out=folder / backend, cache=folder)
        assert second["eval_loss_before"] == pytest.approx(first["eval_loss_after"], rel=1e-6)
    words = refused(folder, *again, "--lora.r", "4")
    assert "'r': 16" in words and "'r': 4" in words
    resumed = [*model(tiny_model), *train, "--training.seed", "2", "--training.resume_from_checkpoint", "true"]
    done = launch.run("1 rank", [*resumed, "--training.output_dir", str(folder / "first")], cache=folder)
    assert done.returncode == 2
    assert "belongs to another plan of steps" in " ".join(done.stdout.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
class TestFullDisk:
    """A tmpfs of a few megabytes as the output folder."""

    @pytest.fixture
    def small(self, tmp_path: Path):
        mount = tmp_path / "small"
        mount.mkdir()

        def make(megabytes: int) -> Path:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(mount)], check=True)
            return mount

        yield make
        subprocess.run(["umount", str(mount)], check=True)

    def test_no_room_at_the_start(self, folder: Path, tiny_model: Path, small) -> None:
        arguments = [*model(tiny_model), *data(folder / "train.jsonl")]
        mount = small(4)
        done = launch.run("1 rank", [*arguments, "--training.output_dir", str(mount / "out")], cache=folder)
        assert done.returncode == 2
        assert "MiB free" in done.stdout and "Traceback" not in done.stdout
        assert list(mount.iterdir()) == []

    @pytest.mark.parametrize("how", ["1 rank", pytest.param("2 ranks", marks=pytest.mark.campaign)])
    def test_disk_that_fills_up_keeps_the_last_whole_checkpoint(
        self, folder: Path, tiny_model: Path, small, how: str
    ) -> None:
        """On two ranks the model is sharded, and both write."""
        out = small(24) / "out"
        script = launch.SPIES / "full_disk.py"
        arguments = [*model(tiny_model), "--data.train_file", str(folder / "train.jsonl"), "--training.max_steps", "6"]
        arguments += [
            "--training.global_batch_size",
            "2",
            "--training.save_steps",
            "2",
            "--training.output_dir",
            str(out),
        ]
        arguments += ["--training.strategy", "shard", "--model.backend", "transformers"] if how == "2 ranks" else []
        done = launch.run(how, arguments, cache=folder, script=script)
        assert done.returncode == 1, done.stdout[-3000:]
        words = " ".join(done.stdout.split())
        assert "No space left" in words and "newest complete checkpoint is checkpoint-2" in words
        assert "Traceback" not in words, done.stdout[-3000:]
        from finetune.engine.checkpoint import checkpoints

        assert checkpoints.find(out, True).path == out / "checkpoint-2"
        assert not list(out.glob(".checkpoint*"))


def test_help_and_version_are_quick_to_answer(folder: Path) -> None:
    for words in (["-m", "finetune.train", "--help"], ["-m", "finetune", "--help"], ["-m", "finetune", "--version"]):
        done = subprocess.run(
            [*launch.command("python"), "-X", "importtime", *words],
            capture_output=True,
            text=True,
            env=launch.environment(folder),
            check=False,
        )
        assert done.returncode == 0 and done.stdout
        assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    done = subprocess.run(
        [*launch.command("python"), "-m", "finetune", "trian"],
        capture_output=True,
        text=True,
        env=launch.environment(folder),
        check=False,
    )
    assert done.returncode == 2 and "Nearest is `train`" in done.stderr
