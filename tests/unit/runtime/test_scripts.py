"""Commands that are given a training script: it runs up to its training, and the answer is that of a configuration."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune import dryrun, prepare
from finetune.errors import UserError
from finetune.measure import trial
from finetune.runtime import scripts
from finetune.runtime.options import Options, counts
from finetune.runtime.scripts import Answer
from tests.helpers import runs, tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]

TRAINS = "import finetune\nfrom pathlib import Path\nfrom finetune.runtime import scripts\n"
MINE = """
import argparse
from pathlib import Path
from finetune import SFTConfig, SFTTrainer
from datasets import load_dataset

parser = argparse.ArgumentParser()
parser.add_argument("--rows")
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()
rows = load_dataset("json", data_files=options.rows, split="train")
trainer = SFTTrainer(
    "m",
    SFTConfig(
        output_dir="out",
        max_steps=options.steps,
        max_length=64,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        bf16=False,
        use_cpu=True,
        SETTINGS
    ),
    train_dataset=rows,
    ARGUMENTS
)
trainer.train()
Path("marker").touch()
"""


MAPS = """
def shout(row):
    return {"text": row["text"] + END}


END = "!"
rows = rows.map(shout)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: a model `m`, rows `rows.jsonl`, and few steps for a dry run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_BACKEND", "transformers")
    monkeypatch.setattr(trial, "TYPICAL_STEPS", trial.ENOUGH)
    (tmp_path / "m").symlink_to(model)
    lines = [json.dumps({"text": f"row {n} " + "word " * (n % 7 + 1)}) for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with runs.in_this_process(monkeypatch, tmp_path):
        yield tmp_path


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(source)
        return name

    return write


def mine(settings: str = "", arguments: str = "") -> str:
    return MINE.replace("SETTINGS", settings).replace("ARGUMENTS", arguments)


def answers(code: int = 0, seen: list[Any] | None = None) -> Answer:
    def answer(*given: Any) -> int:
        (seen if seen is not None else []).append(given)
        return code

    return Answer(trainer=answer)


# --- running a script -------------------------------------------------------------------------------------------------


def test_a_script_runs_up_to_its_training_and_nothing_after(write: Callable[..., str], tmp_path: Path) -> None:
    source = """
import sys
try:
    scripts.answer_trainer(sys.argv + [__name__, sys.path[0]])
except Exception:
    Path("caught").touch()
finally:
    Path("finally").touch()
Path("marker").touch()
"""
    seen: list[Any] = []
    argv, path = sys.argv[:], sys.path[:]
    assert scripts.run([write(TRAINS + source), "-x", "1"], answers(3, seen)) == 3
    assert seen == [(["mine.py", "-x", "1", "__main__", str(tmp_path)],)]
    assert {one.name for one in tmp_path.iterdir()} == {"mine.py", "finally"}
    assert (sys.argv, sys.path) == (argv, path) and scripts.running_script() is None
    scripts.answer_trainer(None)  # no command has asked: it returns


def test_a_script_that_catches_the_end_is_answered_once(write: Callable[..., str]) -> None:
    source = (
        "for _ in range(2):\n    try:\n        scripts.answer_trainer(1)\n    except BaseException:\n        pass\n"
    )
    seen: list[Any] = []
    assert scripts.run([write(TRAINS + source)], answers(1, seen)) == 1
    assert len(seen) == 1


def test_a_script_that_ends_without_training_is_an_error(write: Callable[..., str]) -> None:
    for end in ("", "raise SystemExit", "raise SystemExit(0)"):
        with pytest.raises(UserError, match=r"mine.py ended without calling SFTTrainer.train\(\)") as caught:
            scripts.run([write(TRAINS + end)], answers())
        assert caught.value.exit_code == 2


def test_a_script_that_ends_itself_keeps_its_exit_code(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts.run([write(TRAINS + "raise SystemExit(7)")], answers()) == 7
    assert scripts.run([write(TRAINS + "raise SystemExit('no data')")], answers()) == 1
    assert capsys.readouterr().err == "no data\n"


@pytest.mark.parametrize(
    "source",
    [
        "from pathlib import Path\nfrom trl import SFTTrainer\nPath('ran').touch()\n",
        "from pathlib import Path\nfrom finetune import SFTConfig\nfrom trl import SFTTrainer\nPath('ran').touch()\n",
        "from pathlib import Path\nfrom .finetune import SFTTrainer\nPath('ran').touch()\n",
    ],
)
def test_a_script_of_trl_is_refused_before_it_runs(write: Callable[..., str], tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match="Change `from trl import SFTTrainer` to `from finetune import SFTTrainer`"):
        scripts.run([write(source)], answers())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "source",
    [
        "import finetune",
        "from finetune import *",
        "def main():\n    from finetune import SFTTrainer as Mine",
        "try:\n    from finetune.drop_in import SFTTrainer\nexcept ImportError:\n    from trl import SFTTrainer",
    ],
)
def test_every_way_to_import_the_trainer_is_known(write: Callable[..., str], source: str) -> None:
    scripts.check(write(source))


def test_what_is_no_script_is_an_error(write: Callable[..., str]) -> None:
    for name, expected in (
        ("gone.py", r"the script cannot be read: gone.py: No such file"),
        (write("x = (\n", "half.py"), r"half.py:1 is not valid Python"),
        (write("x = '\0'\n", "null.py"), r"null.py.* is not valid Python"),
    ):
        with pytest.raises(UserError, match=expected):
            scripts.check(name)


# --- the command line -------------------------------------------------------------------------------------------------


def split(*words: str) -> tuple[dict[str, Any], list[str], list[str]]:
    options = Options("parity", "", script=True)
    options.add("--world-sizes", counts, "1,2", "", [1, 2])
    options.add("--model", str, "NAME", "")
    options.add_switch("--fast", "")
    found, rest, script = options.split_script(words)
    return {name: value for name, value in vars(found).items() if value}, rest, script


def test_options_of_the_command_are_found_around_the_script() -> None:
    given = (
        "--fast",
        "mine.py",
        "a b",
        "--lr",
        "-1",
        "--world-sizes",
        "1,4",
        "--model=m",
        "--",
        "--fast",
        "--model",
        "x",
    )
    assert split(*given) == (
        {"fast": True, "world_sizes": [1, 4], "model": "m"},
        [],
        ["mine.py", "a b", "--lr", "-1", "--fast", "--model", "x"],
    )
    assert split("--config", "a.yaml", "--fast")[1:] == (["--config", "a.yaml"], [])


def test_a_script_and_a_configuration_exclude_each_other() -> None:
    for words in (("--config", "a.yaml", "mine.py"), ("--training.max_steps", "3", "mine.py")):
        with pytest.raises(UserError, match="a script and a configuration were given: mine.py and --"):
            split(*words)


@pytest.mark.parametrize("command", [dryrun, prepare])
def test_the_help_of_a_command_is_asked_before_the_script(
    command: Any, write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = write("import argparse\n" + TRAINS + "argparse.ArgumentParser('mine.py').parse_args()\n")
    assert command.main(["--help", script]) == 0
    assert "SCRIPT.py [its arguments]" in capsys.readouterr().out
    assert command.main([script, "--help"]) == 2
    found = capsys.readouterr()
    assert found.out.startswith("usage: mine.py") and "ended without calling SFTTrainer.train()" in found.err


def test_an_error_names_the_line_of_the_script(folder: Path, write: Callable[..., str], capsys: Any) -> None:
    script = write(mine(arguments="compute_metrics=print,"))
    assert dryrun.main([script, "--rows", "rows.jsonl"]) == 2
    found = capsys.readouterr().err
    assert "error: SFTTrainer: `compute_metrics`: " in found and "\n  at mine.py:12: trainer = SFTTrainer(\n" in found


# --- dryrun -----------------------------------------------------------------------------------------------------------


def dry(*words: str, code: int = 0) -> dict[str, Any]:
    assert dryrun.main([*words, "--json", "dry.json"]) == code
    return json.loads(Path("dry.json").read_text())


def test_the_dry_run_of_a_script_is_that_of_the_same_job_in_yaml(
    folder: Path, write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {one.name for one in folder.iterdir()} | {"mine.py"}
    batch = "per_device_train_batch_size=4, gradient_accumulation_steps=2,"
    script = dry(write(mine(batch, "eval_dataset=rows.select(range(5)),")), "--rows", "rows.jsonl", "--steps", "5")
    words = " ".join(capsys.readouterr().out.split())
    assert "GO. Only the measurement was saved. Start the real run with: python mine.py --rows rows.jsonl" in words
    assert script["launch"] == "python mine.py --rows rows.jsonl --steps 5"
    assert {one.name for one in folder.iterdir()} == before | {"cache", "dry.json"}  # no `out`, no `marker`

    given = {
        "model.model_name_or_path": "m",
        "model.backend": "transformers",
        "model.full_finetuning": "true",
        "data.train_file": "rows.jsonl",
        "data.max_length": "64",
        "training.global_batch_size": "8",
        "training.per_device_train_batch_size": "4",
        "training.max_steps": "5",
        "training.learning_rate": "1e-2",
        "training.lr_scheduler_type": "linear",
        "training.warmup_steps": "0",
        "training.weight_decay": "0",
        "training.optim": "adamw_torch_fused",
        "training.seed": "42",
    }
    yaml = dry(*(word for name, value in given.items() for word in (f"--{name}", value)))
    assert script["longest_row_tokens"] == yaml["longest_row_tokens"]
    for name in ("steps", "tokens_per_step", "global_batch_size", "per_device", "gradient_bytes", "parameters"):
        assert script["measurement"][name] == yaml["measurement"][name], name
    assert script["measurement"]["peak_memory_bytes"] == pytest.approx(
        yaml["measurement"]["peak_memory_bytes"], rel=0.2
    )
    assert script["losses"][: trial.WORST_STEPS] == pytest.approx(yaml["losses"][: trial.WORST_STEPS], rel=1e-5)
    for section in ("model", "data", "training"):
        assert script["config"][section].keys() == yaml["config"][section].keys()
    assert script["config"]["training"]["global_batch_size"] == yaml["config"]["training"]["global_batch_size"] == 8


def test_devices_of_another_machine_are_given(
    folder: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(dryrun, "check_collectives", lambda gpus: seen.append("an all-reduce over GPUs of this one"))
    monkeypatch.setattr(dryrun, "measure", lambda config, world, *_, **__: seen.append((config, world)) or 0)
    yaml = ["--model.model_name_or_path", "m", "--data.train_file", "rows.jsonl"]
    per_device = ["--training.per_device_train_batch_size", "4", "--training.gradient_accumulation_steps", "2"]
    script = write(mine("per_device_train_batch_size=4, gradient_accumulation_steps=2,"))
    assert dryrun.main([script, "--rows", "rows.jsonl", "--devices", "4"]) == 0
    assert dryrun.main(["--devices", "4", *yaml, *per_device]) == 0
    assert [world for _, world in seen] == [4, 4] and seen[0][0].training.global_batch_size == 32


@pytest.mark.parametrize(
    ("gpus", "fixed", "world", "size"), [(4, None, 4, 32), (4, 8, 4, 8), (3, 8, 2, 8), (0, 8, 1, 8)]
)
def test_the_batch_is_that_of_the_launch_on_all_gpus(
    folder: Path,
    write: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    fixed: int | None,
    world: int,
    size: int,
) -> None:
    monkeypatch.setattr(dryrun.strategy, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(dryrun, "check_collectives", lambda gpus: None)
    seen: list[Any] = []
    monkeypatch.setattr(dryrun, "measure", lambda config, world, *_, **__: seen.append((config, world)) or 0)
    batch = "per_device_train_batch_size=4, gradient_accumulation_steps=2,"
    arguments = f"global_batch_size={fixed}," if fixed else ""
    assert dryrun.main([write(mine(batch, arguments)), "--rows", "rows.jsonl"]) == 0
    ((config, ranks),) = seen
    assert ranks == world and config.training.global_batch_size == size


def test_the_callbacks_of_the_script_and_its_trackers_see_no_dry_run(folder: Path, write: Callable[..., str]) -> None:
    watch = "import transformers\nclass Watch(transformers.TrainerCallback):\n    def on_train_begin(self, *a, **k):\n"
    source = mine("per_device_train_batch_size=4,", "callbacks=[Watch()],")
    source = source.replace("trainer = ", watch + "        Path('marker').touch()\ntrainer = ")
    assert dry(write(source), "--rows", "rows.jsonl")["go"]
    assert not (folder / "marker").exists()


def test_one_device_stands_in_for_those_that_share_a_row(folder: Path, write: Callable[..., str]) -> None:
    script = write(mine("per_device_train_batch_size=4, context_parallel=2,"))
    shared, whole = dry(script, "--rows", "rows.jsonl", "--devices", "2"), dry(write(mine()), "--rows", "rows.jsonl")
    assert shared["go"] and shared["measurement"]["shared_by"] == 2
    assert shared["config"]["training"]["global_batch_size"] == 4  # of one group of ranks
    assert whole["measurement"]["shared_by"] == 1


def test_a_script_that_fills_the_gpu_before_its_training_is_no_go(
    folder: Path, write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(TRAINS + "import torch\nraise torch.OutOfMemoryError('CUDA out of memory: 20 GiB')\n")
    found = dry(script, code=1)
    assert (found["go"], found["out_of_memory"], found["state_fits"], found["config"]) == (False, True, False, None)
    assert "NO-GO: the script ran out of GPU memory before training: CUDA out of memory" in capsys.readouterr().out


# --- prepare ----------------------------------------------------------------------------------------------------------


def prepared(*words: str) -> dict[str, Any]:
    assert prepare.main([*words, "--json", "rows.json"]) == 0
    found = json.loads(Path("rows.json").read_text())
    assert not Path("marker").exists() and not Path("out").exists()
    return found


def test_the_rows_of_a_script_are_those_of_its_trainer(
    folder: Path, write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = "eval_dataset={'a': rows.select(range(5)), 'b': rows.select(range(5, 8))},"
    script = write(mine("per_device_train_batch_size=4, packing=True,", held_out))
    found = prepared(script, "--rows", "rows.jsonl")
    assert {name: one["rows_read"] for name, one in found["ledger"].items()} == {"train": 40, "eval_a": 5, "eval_b": 3}
    assert not found["cached"] and found["ledger"]["train"]["layout"]["pack_length"] == 64
    assert "r⟦ow 0 word <|im_end|>⟧" in capsys.readouterr().out
    again = prepared(script, "--rows", "rows.jsonl")
    assert again["cached"] and again["fingerprint"] == found["fingerprint"]
    yaml = prepared("--model.model_name_or_path", "m", "--data.train_file", "rows.jsonl", "--data.max_length", "64")
    for name in ("rows_read", "rows_kept", "tokens", "supervised_tokens"):
        assert found["ledger"]["train"][name] == yaml["ledger"]["train"][name], name


def test_training_finds_the_rows_that_were_prepared(
    folder: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mine("per_device_train_batch_size=4,").replace("trainer = ", MAPS + "trainer = ")
    script = write(source)
    assert not prepared(script, "--rows", "rows.jsonl")["cached"]
    monkeypatch.setattr(sys, "argv", [script, "--rows", "rows.jsonl", "--steps", "1"])
    runpy.run_path(script, run_name="__main__")
    assert Path("marker").exists() and len(list(Path("cache/data").glob("*/entry.json"))) == 1
