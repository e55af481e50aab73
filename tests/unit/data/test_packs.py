"""Packing, compared with simple, slow algorithms."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data import packs as packs_module
from finetune.data.layout import Layout
from finetune.data.packs import Packs, one_per_row, pack, padding_segments, random_order
from tests.helpers import launch


def plain_best_fit(lengths: list[int], pack_length: int, order: list[int], open_packs: int = 4096) -> list[list[int]]:
    """Each document into the fullest open pack with room for it; of several, the one opened first. The fullest open
    pack is closed if there are too many."""
    packs: list[list[int]] = []
    rooms: dict[int, int] = {}
    for document in order:
        fitting = [(room, i) for i, room in rooms.items() if room >= lengths[document]]
        if fitting:
            i = min(fitting)[1]
        else:
            if len(rooms) == open_packs:
                del rooms[min((room, i) for i, room in rooms.items())[1]]
            i = len(packs)
            packs.append([])
            rooms[i] = pack_length
        packs[i].append(document)
        rooms[i] -= lengths[document]
        if not rooms[i]:
            del rooms[i]
    return packs


def plain_best_fit_decreasing(lengths: list[int], pack_length: int) -> list[list[int]]:
    return plain_best_fit(lengths, pack_length, sorted(range(len(lengths)), key=lambda i: -lengths[i]), len(lengths))


def plain_next_fit(lengths: list[int], pack_length: int, order: list[int]) -> list[list[int]]:
    packs: list[list[int]] = [[]]
    for document in order:
        if sum(lengths[i] for i in packs[-1]) + lengths[document] > pack_length:
            packs.append([])
        packs[-1].append(document)
    return packs


def as_lists(packs: Packs) -> list[list[int]]:
    return [packs[i].tolist() for i in range(len(packs))]


def lognormal(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(6.0, 0.8, n).round().clip(32, 2048).astype(np.int64)


def plain_order(lengths: list[int], pack_length: int, key: str) -> list[int]:
    order = random_order(len(lengths), key).tolist()
    per_pack = pack_length * len(lengths) // sum(lengths)
    size = per_pack if per_pack >= 2 else 128
    blocks = [order[i : i + size] for i in range(0, len(order), size)]
    return sum((sorted(block, key=lambda i: -lengths[i]) for block in blocks), [])


def test_equals_plain_best_fit_on_thousands_of_random_cases():
    rng = np.random.default_rng(0)
    for case in range(3000):
        pack_length = int(rng.integers(1, 60))
        longest = int(rng.integers(1, pack_length + 1))
        lengths = rng.integers(1, longest + 1, size=rng.integers(1, 80))
        order = plain_order(lengths.tolist(), pack_length, str(case))
        assert as_lists(pack(lengths, pack_length, str(case))) == plain_best_fit(lengths.tolist(), pack_length, order)


def test_the_number_of_open_packs_is_bounded(monkeypatch):
    monkeypatch.setattr(packs_module, "OPEN_PACKS", 3)
    lengths = lognormal(400)
    for pack_length in (2048, 4096):
        order = plain_order(lengths.tolist(), pack_length, "a")
        expected = plain_best_fit(lengths.tolist(), pack_length, order, open_packs=3)
        assert as_lists(pack(lengths, pack_length, "a")) == expected


def test_the_key_alone_chooses_the_order():
    lengths = lognormal(300)
    first, again, other = (as_lists(pack(lengths, 4096, key)) for key in ("a", "a", "b"))
    assert first == again != other


def gsm8k(n: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).lognormal(5.11, 0.36, n).round() + 30).clip(90, 570).astype(np.int64)


def mean_length_sd(lengths: np.ndarray, packs: list[list[int]], batch: int) -> tuple[float, float]:
    """Standard deviation of the mean document length of random steps of `batch` packs, and documents per step."""
    tokens, counts = (np.array([f(pack) for pack in packs]) for f in (lambda pack: lengths[pack].sum(), len))
    rng, means, held = np.random.default_rng(0), [], []
    for _ in range(40):
        steps = rng.permutation(len(packs))[: len(packs) // batch * batch].reshape(-1, batch)
        means.append(tokens[steps].sum(1) / counts[steps].sum(1))
        held.append(counts[steps].sum(1))
    return float(np.std(means)), float(np.mean(held))


SHAPES = {
    "gsm8k": lambda n, seed: gsm8k(n, seed),
    "chat": lambda n, seed: lognormal(n, seed),
    "wide": lambda n, seed: np.random.default_rng(seed).lognormal(6, 1.2, n).round().clip(8, 2048).astype(np.int64),
    "uniform": lambda n, seed: np.random.default_rng(seed).integers(100, 2048, n),
    "cut": lambda n, seed: np.minimum(np.random.default_rng(seed).lognormal(7, 0.8, n).round() + 32, 2048).astype(int),
}


@pytest.mark.parametrize("pack_length", [2048, 4096])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.campaign
def test_a_step_is_a_random_sample_and_packs_are_full(shape, pack_length):
    """Against next-fit in random order (the spread of a step's mean document length), independent random documents, and
    best-fit decreasing (the share of padding). Sorted packs fail by a factor of 1.4 to 4."""
    lengths = SHAPES[shape](8000, 1)
    packs = as_lists(pack(lengths, pack_length, "key"))
    sd, documents = mean_length_sd(lengths, packs, 8)
    order = np.random.default_rng(5).permutation(len(lengths)).tolist()
    assert sd <= 1.15 * mean_length_sd(lengths, plain_next_fit(lengths.tolist(), pack_length, order), 8)[0]
    if documents >= 64:
        assert sd <= 1.15 * lengths.std() / documents**0.5
    best = len(plain_best_fit_decreasing(lengths.tolist(), pack_length))
    lost = lengths.sum() / pack_length * (1 / best - 1 / len(packs))
    assert lost <= (0.007 if len(lengths) / best >= 8 else 0.015)


@settings(deadline=None)
@given(st.data())
def test_every_document_once_and_no_pack_too_long(data):
    pack_length = data.draw(st.integers(1, 5000))
    lengths = np.array(data.draw(st.lists(st.integers(1, pack_length), max_size=60)), dtype=np.int64)
    packs = pack(lengths, pack_length, "key")
    assert sorted(packs.documents.tolist()) == list(range(len(lengths)))
    assert packs.tokens.tolist() == [sum(lengths[i] for i in members) for members in as_lists(packs)]
    assert packs.squares.tolist() == [sum(lengths[i] ** 2 for i in members) for members in as_lists(packs)]
    assert all(0 < total <= pack_length for total in packs.tokens)
    assert packs.tokens.sum() == lengths.sum()


def test_efficiency_on_lognormal_and_gsm8k_shaped_lengths():
    assert pack(gsm8k(7473, 1), 16384, "key").efficiency >= 0.98
    for pack_length in (2048, 16384):
        packs = pack(lognormal(50_000), pack_length, "key")
        assert packs.efficiency >= 0.99
        assert packs.efficiency == pytest.approx(packs.tokens.sum() / (len(packs) * pack_length))


def test_result_does_not_depend_on_the_integer_type():
    lengths = lognormal(300)
    expected = as_lists(pack(lengths, 4096, "key"))
    for dtype in (np.int32, np.uint16, np.uint64):
        assert as_lists(pack(lengths.astype(dtype), 4096, "key")) == expected


def test_totals_sum_a_value_per_document():
    packs = pack(np.array([3, 5, 2, 7, 1]), 8, "key")
    labels = np.array([1, 0, 2, 4, 8])
    assert packs.totals(labels).tolist() == [sum(labels[i] for i in members) for members in as_lists(packs)]


def test_costs_count_attention_per_document_and_padding():
    packs = pack(np.array([6, 3]), 10, "key")  # one pack: 6 + 3 + 1 of padding
    assert packs.costs(hidden_size=4).tolist() == pytest.approx([10 + (36 + 9 + 1) / 48])
    padded = pack(np.array([6]), 1000, "key")  # segments of 255, 256, 256 and 227
    assert padded.costs(hidden_size=4).tolist() == pytest.approx([1000 + (36 + 255**2 + 2 * 256**2 + 227**2) / 48])
    assert one_per_row(np.array([6, 3])).costs(hidden_size=4).tolist() == pytest.approx([6 + 36 / 48, 3 + 9 / 48])


@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 511, 512, 1024, 16384])
def test_padding_is_split_into_short_segments_that_are_not_all_alike(tokens):
    segments = padding_segments(tokens)
    assert sum(segments) == tokens and all(0 < one <= 256 for one in segments)
    assert tokens < 256 or len(set(segments)) > 1


ATTENTION = """
import torch, unsloth
import unsloth.utils.attention_dispatch as dispatch
from torch.nn.attention import SDPBackend
from finetune.data.packs import padding_segments

dispatch._sdpa_backend_state = lambda *given: (True, int(SDPBackend.FLASH_ATTENTION))  # what a GPU would answer
query, key = (torch.empty(1, heads, 16384, 64, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
for segments in ((200, 300, 15884), (16384,), (8192, 8192), tuple(padding_segments(16384))):
    print("FOUND", dispatch._torch_varlen_beats_segments(query, key, segments, 4, True))
"""


@pytest.mark.unsloth
@pytest.mark.process
@pytest.mark.campaign
def test_a_dummy_row_uses_the_same_attention_as_other_packs(tmp_path):
    """The installed Unsloth's rule for a pack of documents, one segment, two equal segments, and a dummy row."""
    done = launch.on_the_installed_unsloth(ATTENTION, tmp_path)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert found == ["True", "False", "False", "True"], done.stderr[-3000:]


def test_of_full_packs_the_one_with_the_longest_documents_comes_first():
    rows: Any = None  # only the sizes of the packs are used
    documents, offsets = np.array([3, 0, 1, 2, 4]), np.array([0, 1, 4, 5])  # 10; 4 + 3 + 3; 2
    sizes = {"documents": documents, "offsets": offsets, "tokens": np.array([10, 10, 2]), "pack_length": 10}
    for squares, expected in (([100, 34, 4], [0, 1, 2]), ([34, 100, 4], [1, 0, 2])):
        packs = Packs(**sizes, squares=np.array(squares))
        assert Layout(rows=rows, packs=packs).largest_first().tolist() == expected


def test_unpacked_keeps_each_document_as_a_row_in_order():
    rows = one_per_row(np.array([4, 9, 2]))
    assert as_lists(rows) == [[0], [1], [2]]
    assert rows.tokens.tolist() == [4, 9, 2]
    assert rows.squares.tolist() == [16, 81, 4]
    assert rows.totals(np.array([1, 2, 3])).tolist() == [1, 2, 3]
    assert rows.pack_length is None and rows.efficiency == 1.0


def test_rows_are_indexed_like_a_sequence():
    packs = pack(np.array([5, 5, 5]), 5, "key")
    assert packs[-1].tolist() == packs[2].tolist() == [2]
    assert [members.tolist() for members in packs] == [[0], [1], [2]]
    with pytest.raises(IndexError):
        packs[3]


def test_no_documents_make_no_rows():
    for rows in (pack(np.array([], dtype=np.int64), 8, "key"), one_per_row(np.array([]))):
        assert (
            len(rows) == 0 and rows.tokens.tolist() == [] and rows.totals(np.array([], dtype=np.int64)).tolist() == []
        )


def test_a_document_that_no_pack_holds_is_refused():
    with pytest.raises(ValueError, match="document 1 has 9 tokens and a pack holds 8"):
        pack(np.array([3, 9, 4]), 8, "key")


def test_documents_of_a_micro_batch_are_those_that_are_collated() -> None:
    from finetune.data.collate import collate

    lengths = np.array([900, 100, 30, 30, 30, 500], dtype=np.int64)
    packs = pack(lengths, 1024, "key")

    def segments(row: int | None) -> int:
        documents = [] if row is None else [(np.ones(lengths[one], np.int32),) * 2 for one in packs[row]]
        return len(collate([documents], pad_token_id=0, pack_length=1024)["packed_seq_lengths"])

    counts = [segments(row) for row in (None, *range(len(packs)))]
    assert packs.segments(1) == (min(counts), max(counts) + 1)
    assert packs.segments(3) == (3 * min(counts), 3 * max(counts) + 1)
