import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from finetune.chat.command import own_options, read_prompts
from finetune.config import load
from finetune.engine import demo
from finetune.engine.monitoring import metrics
from finetune.errors import RunError
from tests.helpers import ROOT, launch

PRETRAINED = ROOT / "examples" / "pretrained"
FACT = re.compile(r"(\w+) has a (\w+) (\w+)\.")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoPaths:
    return demo.materialize(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def tokenizer(paths: demo.DemoPaths):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(paths.model_dir)


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def turns(file: Path) -> list[tuple[str, str]]:
    """(prompt, answer) of each row, once it is sure that the rows are one user and one assistant turn."""
    pairs = []
    for row in read(file):
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        pairs.append((user["content"], assistant["content"]))
    return pairs


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def home(paths: demo.DemoPaths) -> Path:
    return paths.model_dir.parent


def facts(prompt: str) -> set[tuple[str, str, str]]:
    return set(FACT.findall(prompt))


@pytest.mark.process
def test_any_rank_of_a_process_group_can_be_the_one_that_writes(paths: demo.DemoPaths, tmp_path: Path) -> None:
    code = """
import sys, pathlib
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from finetune.engine import demo
from finetune.engine.monitoring import metrics
torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
demo.materialize(pathlib.Path(sys.argv[1]))
"""
    done = launch.python(["-c", code, str(tmp_path)], cache=tmp_path.parent)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / home(paths).name) == contents(home(paths))


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    demo.materialize(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_complete_demo_is_reused_and_an_incomplete_one_is_rewritten(tmp_path: Path) -> None:
    paths = demo.materialize(tmp_path)
    whole = contents(home(paths))
    paths.eval_file.write_text("kept\n")
    demo.materialize(tmp_path)
    assert paths.eval_file.read_text() == "kept\n"

    (paths.model_dir / "model.safetensors").unlink()
    left_behind = home(paths).with_name(f"{home(paths).name}.unfinished")
    (left_behind / "model").mkdir(parents=True)
    demo.materialize(tmp_path)
    assert contents(home(paths)) == whole
    assert not left_behind.exists()


def test_a_call_that_fails_leaves_no_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "write_model", no_space)
        with pytest.raises(RunError, match="No space left on device"):
            demo.materialize(tmp_path)
    assert not list(tmp_path.glob("*/train.jsonl"))
    assert demo.materialize(tmp_path).train_file.is_file()


def test_what_was_not_written_whole_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "write_model", lambda *_: None)
    with pytest.raises(RunError, match="files are missing"):
        demo.materialize(tmp_path)
    assert not [one for one in tmp_path.glob("*/model") if one.parent.suffix != ".unfinished"]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunError, match=re.escape(str(file))):
        demo.materialize(file / "demo")


def test_no_held_out_prompt_and_no_fact_of_one_occurs_in_training(paths: demo.DemoPaths) -> None:
    train, held_out = turns(paths.train_file), turns(paths.eval_file)
    assert (len(train), len(held_out)) == (6144, demo.EVAL_ROWS)
    assert len({prompt for prompt, _ in train + held_out}) == len(train) + len(held_out)
    seen = set().union(*(facts(prompt) for prompt, _ in train))
    asked = set().union(*(facts(prompt) for prompt, _ in held_out))
    assert len(seen) > 1000 and len(asked) > 100
    assert not seen & asked


def test_kinds_of_instruction_are_shared_equally(paths: demo.DemoPaths) -> None:
    counts = Counter(re.split(r"[:?]", prompt)[0] for prompt, _ in turns(paths.eval_file))
    assert len(counts) == len(QUESTIONS)
    assert set(counts.values()) == {demo.EVAL_ROWS // len(QUESTIONS)}


QUESTIONS = {
    "Who is named first?": lambda scene: scene[0][0],
    "Who is named last?": lambda scene: scene[-1][0],
    "What does the first person have?": lambda scene: "a {1} {2}".format(*scene[0]),
    "What color is the last thing?": lambda scene: f"It is {scene[-1][1]}.",
    "List the names:": lambda scene: ", ".join(name for name, _, _ in scene),
    "List the names backwards:": lambda scene: ", ".join(name for name, _, _ in scene[::-1]),
    "List the names in capitals:": lambda scene: ", ".join(name.upper() for name, _, _ in scene),
    "Repeat the last sentence:": lambda scene: "{} has a {} {}.".format(*scene[-1]),
}
SCENE = "Anna has a red key. Ben has a blue map."


def test_answers_are_right(paths: demo.DemoPaths) -> None:
    for prompt, answer in turns(paths.train_file) + turns(paths.eval_file):
        question, separator, _ = re.split(r"(?<=[:?])( )", prompt, maxsplit=1)
        scene = FACT.findall(prompt)
        assert separator and len(scene) in (2, 3) and answer == QUESTIONS[question](scene), prompt


def test_model_loads_and_is_small(paths: demo.DemoPaths, tokenizer) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(paths.model_dir)
    assert model.config.vocab_size == len(tokenizer)
    assert 300_000 < model.num_parameters() < 3_000_000
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.config, name) == getattr(model.generation_config, name) == getattr(tokenizer, name)


@pytest.mark.parametrize("text", [SCENE, "ANNA, BEN", "naïve  café\n\t日本 🙂", " leading, and two  spaces "])
def test_tokenizer_gives_any_text_back(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_are_distinct_and_single(tokenizer) -> None:
    ids = [tokenizer(token).input_ids for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")]
    assert all(len(one) == 1 for one in ids) and len({one[0] for one in ids}) == len(ids)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|im_end|>", "<|pad|>")


def test_words_of_the_task_are_single_tokens(paths: demo.DemoPaths, tokenizer) -> None:
    """The model learns to pick words: one that is split makes the task a harder one than what was measured."""
    words = {word for prompt, _ in turns(paths.train_file) for fact in facts(prompt) for word in fact}
    assert len(words) == 36
    for word in words:
        assert len(tokenizer(f" {word}").input_ids) == 1, word


def test_chat_template_renders_chatml(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Ben"},
    ]
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True) == prompt
    assert tokenizer.apply_chat_template(messages, tokenize=False) == prompt + "Ben<|im_end|>\n"


@pytest.mark.campaign
def test_rows_and_answers_are_within_the_stated_lengths(paths: demo.DemoPaths, tokenizer) -> None:
    """And a prompt's tokens begin its row's: what is generated from is what was trained on."""
    for row in read(paths.train_file) + read(paths.eval_file):
        whole = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        assert whole[: len(prompt)] == prompt
        assert len(whole) <= demo.MAX_LENGTH
        assert len(whole) - len(prompt) <= demo.MAX_NEW_TOKENS


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_global_batch_is_one_micro_batch_of_each_rank(world_size: int) -> None:
    training = demo.overrides(world_size)["training"]
    assert training["per_device_train_batch_size"] * world_size == training["global_batch_size"]


@pytest.mark.parametrize(
    ("answer", "reference", "share"),
    [
        ("a red key", "a red key", 1.0),
        ("  a  red\nkey\n", "a red key", 1.0),
        ("A red key", "a red key", 0.0),
        ("a red key.", "a red key", 0.0),
        ("a redkey", "a red key", 0.0),
        ("", "a red key", 0.0),
    ],
)
def test_exact_match_ignores_white_space_alone(answer: str, reference: str, share: float) -> None:
    assert metrics.exact_match([answer], [reference]) == share


def test_exact_match_is_a_share() -> None:
    assert metrics.exact_match(["Ben", "Anna", "Leo", "Ivy"], ["Ben", "Anna", "Leo", "Jack"]) == 0.75


@pytest.mark.parametrize(("answers", "references"), [([], []), (["Ben"], []), (["Ben"], ["Ben", "Leo"])])
def test_exact_match_refuses_what_it_cannot_pair(answers: list[str], references: list[str]) -> None:
    with pytest.raises(ValueError, match="one answer for each"):
        metrics.exact_match(answers, references)


def test_introduction_says_what_it_is_and_what_to_do_with_a_model_of_ones_own() -> None:
    text = demo.introduction()
    assert "This is the demo" in text and "not a\npretrained one" in text
    assert "finetune init" in text and "finetune train my.yaml" in text


# --- make demo-pretrained ---------------------------------------------------------------------------------------------


def recipe(command: str) -> list[str]:
    """The arguments of a command in the Makefile's recipe of the pretrained demo."""
    lines = (ROOT / "Makefile").read_text().partition("\ndemo-pretrained:")[2].partition("\n\n")[0]
    return shlex.split(next(line for line in lines.splitlines() if command in line).partition(command)[2])


def test_the_pretrained_demo_trains_and_asks_with_valid_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(recipe("finetune.train "))
    chat, _ = own_options().split(recipe("finetune chat "))
    assert str(chat.run) == config.training.output_dir
    assert chat.compare
    notes = {note for name in ("train", "held_out") for note, _ in turns(PRETRAINED / f"{name}.jsonl")}
    asked = read_prompts(chat.prompts)
    assert len(asked) == 3
    assert not notes & set(asked)
    rows, held_out = (read(Path(str(file))) for file in (config.data.train_file, config.data.eval_file))
    assert (len(rows), len(held_out)) == (96, 12)


def test_the_pretrained_demo_answers_with_what_the_note_says() -> None:
    said: dict[str, set[str]] = {}
    for name in ("train", "held_out"):
        found = turns(PRETRAINED / f"{name}.jsonl")
        assert len({note for note, _ in found}) == len(found)
        for note, answer in found:
            facts = json.loads(answer)
            assert list(facts) == ["what", "who", "day", "time"]
            assert all(fact.lower() in note.lower() for fact in facts.values()), note
            said.setdefault(name, set()).update((facts["what"], facts["who"]))
    assert not said["train"] & said["held_out"]  # read from the note, not memorized
