"""`--dry-run`: the verdict, and that nothing is left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune.runtime import runlock
from tests.distributed.test_training import faulty
from tests.helpers import launch, tiny

pytestmark = pytest.mark.process


def arguments(model: Path, data: Path, *extra: str) -> list[str]:
    return [
        "--dry-run",
        "--model.model_name_or_path",
        str(model),
        "--data.train_file",
        str(data / "train.jsonl"),
        *extra,
    ]


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.campaign)])
def test_go_then_the_real_run_is_scored(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    tiny.make_rows(tmp_path / "train.jsonl", 60)
    before = sorted(tmp_path.iterdir())
    extra = ["--model.full_finetuning"] if kind == "full" else []
    out, cache = tmp_path / "out", tmp_path / "cache"
    cache.mkdir()
    report = ["--json", str(cache / "dry.json"), "--training.output_dir", str(out)]
    done = launch.run("1 rank", arguments(tiny_model, tmp_path, *extra, *report), cache=cache)
    assert done.returncode == 0, done.stdout[-4000:]
    words = " ".join(done.stdout.split())
    assert "GO. Only the measurement was saved." in words and "saved and reloaded" in words
    assert "python -m finetune.train" in words and "--dry-run" not in words.split("GO.")[1]
    assert "not searched, because a CPU run has no separate memory limit" in words
    assert "⟦" in words  # one example, its supervised part marked
    assert sorted(path for path in tmp_path.iterdir() if path != cache) == before
    verdict = json.loads((cache / "dry.json").read_text())
    check(verdict, cache)
    assert verdict["measurement"]["as_bucket_view"] is (kind == "full")  # Adam's states are there: twice the gradients

    # The same job for real: what was predicted is compared with what happened.
    real = [word for word in arguments(tiny_model, tmp_path, *extra) if word != "--dry-run"]
    run = launch.train("1 rank", [*real, "--logging.generate_samples", "0"], out=out, cache=cache)
    phases = ["python", "libraries", "data", "ranks", "model", "trainer", "evaluation", "first step"]
    assert [phase for phase in run["start_up"] if phase != "launcher"] == phases
    assert sum(run["start_up"].values()) == run["seconds_to_first_step"] > 0
    assert run["micro_batch_search"] is None and run["micro_batch"]["reason"].startswith("the default: a CPU run")
    prediction = run["prediction"]
    assert prediction["source"] == verdict["measurement_file"] and prediction["reason"] is None
    assert prediction["step_seconds"]["measured"] == run["step_seconds_median"]
    assert prediction["step_seconds"]["predicted"] > 0
    for name in ("step_seconds", "peak_memory_gib", "tokens_per_second_per_gpu"):
        one = prediction[name]
        assert one["error"] == pytest.approx((one["predicted"] - one["measured"]) / one["measured"])
    assert abs(prediction["peak_memory_gib"]["error"]) < 0.2
    events = EventAccumulator(str(out / "runs" / out.name))
    events.Reload()
    assert "9 prediction/error of step time [1]" in events.Tags()["scalars"]


def check(verdict: dict, cache: Path) -> None:
    """The figures of a dry run hang together."""
    lengths = json.loads(next((cache / "data").glob("*/entry.json")).read_text())["about"]["ledgers"]["train"]
    assert verdict["go"] and verdict["collectives"] is None  # no second GPU to talk to
    assert verdict["longest_row_tokens"] >= lengths["tokens"] / lengths["rows_kept"]
    measured = verdict["measurement"]
    assert len(verdict["losses"]) >= 9
    # Four steps of 16, 16, 16 and 12 rows, projected from their own sizes.
    assert measured["steps"] == 4 and measured["tokens_per_step"] == lengths["tokens"] / 4
    whole = verdict["projection"]
    assert whole["step_seconds"] == pytest.approx(sum(verdict["step"].values()))
    assert whole["tokens_per_second"] == pytest.approx(measured["tokens_per_step"] / whole["step_seconds"])
    hours = (4 * whole["step_seconds"] + whole["start_up_seconds"]) / 3600
    assert whole["hours_on_one_device"] == pytest.approx(hours)
    assert set(measured["compute_seconds"]) == {"1", "2"}  # what holds 16 rows in micro-batches of 8
    assert measured["compute_seconds"]["2"] < measured["compute_seconds"]["1"]
    assert sum(measured["gradient_bytes"]) == 4 * measured["trainable_parameters"]
    assert sorted(path.name for path in (cache / "measurements").iterdir()) == [Path(verdict["measurement_file"]).name]


@pytest.mark.parametrize(
    ("fits", "full", "code", "said"),
    [
        (13, 17, 0, "8 8.0 GiB .* 12 12.0 GiB .* 16 16.0 GiB .* The largest that fits is 12. Recommended: "),
        (3, 7, 1, "CUDA ran out of memory: 8 rows .* Tried: the largest micro-batch that fits has 3 rows "),
        (3, 0, 1, "Tried: weights, gradients and optimizer state fill the device before any row is processed"),
    ],
    ids=["fits", "full", "full without rows"],
)
@pytest.mark.campaign
def test_the_largest_micro_batch_is_found_by_trying(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, fits: int, full: int, code: int, said: str
) -> None:
    script = launch.SPIES / "small_device.py"
    extra = [
        "--training.global_batch_size",
        "48",
        "--model.backend",
        "transformers",
        "--json",
        str(tmp_path / "d.json"),
    ]
    sizes = ["--training.output_dir", str(tmp_path / "out"), *extra]
    given = arguments(tiny_model, tiny_data, *sizes)
    done = launch.run("1 rank", given, cache=tmp_path, script=script, FITS=str(fits), FULL=str(full))
    assert done.returncode == code, done.stdout[-4000:]
    words = " ".join(done.stdout.split())
    assert re.search(said, words), words[-2000:]
    found = json.loads((tmp_path / "d.json").read_text())
    if full == 0:
        assert found["out_of_memory"] and not found["state_fits"]
        return
    # Of a global batch of 48: doubled from 8, or halved, then bisected.
    tried = {one["per_device"]: one["fits"] for one in found["micro_batch_search"]["attempts"]}
    expected = {8: True, 12: True, 16: False} if code == 0 else {6: False, 3: True, 4: False}
    assert tried == expected
    sizes = found["micro_batch_search"]
    fitting = [size for size, ok in tried.items() if ok]
    assert sizes["largest_that_fits"] == max(fitting)
    assert sizes["recommended"] in fitting  # a smaller one where that was faster, which is the machine's to say
    assert sizes["flag"] == f"--training.per_device_train_batch_size {sizes['recommended']}"
    assert sizes["flag"] in words and found.get("out_of_memory", False) is (code == 1)


@pytest.mark.campaign
def test_no_go_where_the_loss_is_not_finite(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    done = faulty("1 rank", arguments(tiny_model, tiny_data), tmp_path / "out", tmp_path, "nan", 0, 1)
    assert done.returncode == 1
    assert "NO-GO: The loss of step 2 is not finite" in " ".join(done.stdout.split())
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".dry-run*"))


@pytest.mark.campaign
def test_beside_a_run_that_uses_the_folder_a_dry_run_works_and_a_second_run_does_not(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "kept").write_text("")
    (out / "run.json").write_text("{}")  # of a finished run
    dry = arguments(tiny_model, tiny_data, "--training.output_dir", str(out))
    with runlock.lock(out, print):
        before = sorted(out.iterdir())
        second = launch.run("python", [word for word in dry if word != "--dry-run"], cache=tmp_path)
        assert second.returncode == 2, second.stdout[-4000:]
        assert (
            second.stdout.startswith("error: training.output_dir is in use by another run")
            and out.name in second.stdout
        )
        done = launch.run("python", dry, cache=tmp_path)
        words = " ".join(done.stdout.split())
        assert done.returncode == 0 and "GO. Only the measurement was saved" in words, done.stdout[-4000:]
        assert "warning: training.output_dir is" in words and "which holds another run (run.json)" in words
        assert sorted(out.iterdir()) == before


@pytest.mark.campaign
def test_a_dry_run_whose_time_is_up_reports_what_it_has_or_ends(tiny_model: Path, tmp_path: Path) -> None:
    tiny.make_rows(tmp_path / "train.jsonl", 60)
    given = [
        *arguments(tiny_model, tmp_path),
        "--training.output_dir",
        str(tmp_path / "out"),
        "--data.eval_fraction",
        "0.3",
    ]
    script = launch.SPIES / "little_time.py"
    done = launch.run("1 rank", given, cache=tmp_path, script=script, STEPS="5")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "loss, first and last of 5" in done.stdout
    done = launch.run("1 rank", given, cache=tmp_path, script=script, STEPS="3")
    assert done.returncode == 1
    assert "NO-GO: 5 minutes were enough for 3 of 9 steps: too few to predict from." in " ".join(done.stdout.split())


def test_no_label_tokens_and_several_ranks_are_bad_input(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    done = launch.run("1 rank", arguments(tiny_model, tmp_path), cache=tmp_path)
    assert done.returncode == 2 and "none of 1 row (train) has a supervised token" in done.stdout
    done = launch.run("2 ranks", arguments(tiny_model, tiny_data), cache=tmp_path)
    assert done.returncode != 0 and "a dry run uses one device" in done.stdout


@pytest.mark.campaign
@pytest.mark.parametrize("shared", [1, 2])
def test_a_sharded_job_is_measured_in_slices_and_its_run_is_scored(shared: int, tmp_path: Path) -> None:
    """The memory of two ranks is that of processes that never held the whole model; also if they share each row."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, cache, out = tmp_path / "model", tmp_path / "cache", tmp_path / "out"
    cache.mkdir()
    tokenizer = tiny.make_tokenizer(model)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 1, hidden_size=256, intermediate_size=512, num_hidden_layers=8,  # type: ignore[arg-type]
        num_attention_heads=8, num_key_value_heads=4, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    tiny.make_rows(tmp_path / "train.jsonl", 60)
    batch = ["--training.global_batch_size", "8", "--training.max_steps", "8", "--training.save_steps", "0"]
    shard = ["--training.strategy", "shard", "--model.full_finetuning", "true", "--training.output_dir", str(out)]
    shard += ["--training.context_parallel", str(shared), "--model.backend", "transformers"]
    words = arguments(model, tmp_path, *batch, *shard)
    done = launch.run("python", [*words, "--json", str(cache / "dry.json")], cache=cache)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Measured with 2 and 4 of 8 layers on one device" in " ".join(done.stdout.split())
    verdict = json.loads((cache / "dry.json").read_text())
    row = next(row for row in verdict["sharded"]["rows"] if row["world_size"] == 2)
    assert row["exposed_seconds"] is None and row["peak_memory_gib"] > 0  # no all-reduce was measured
    assert not out.exists()

    real = [word for word in words if word != "--dry-run"]
    run = launch.train("torchrun", [*real, "--logging.generate_samples", "0"], out=out, cache=cache)
    if shared == 1:
        assert "no all-reduce of 2 ranks was measured" in run["prediction"]["reason"]
    else:
        assert "ranks that share each row" in run["prediction"]["reason"]
    assert verdict["measurement"]["trainable_parameters"] == sum(run["sharding"]["local_elements"])
    assert row["peak_memory_gib"] == pytest.approx(max(run["peak_memory_gib"]), rel=0.3)
