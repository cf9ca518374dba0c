from collections import Counter
from math import log

import numpy as np
import pytest

from jvpipe.models.masking import mask_record, permute_record
from jvpipe.models.text import frequency_loss
from jvpipe.models.tokens import CLS, MASK, SEP, Marks
from jvpipe.models.workload import Batch

VOCABULARY, T, K = 1000, 64, 9


def masked(record: np.ndarray, seed: int) -> Batch:
    generator = np.random.default_rng(seed)
    return mask_record(record, generator, vocabulary=VOCABULARY, masked=K, mask_rate=0.15)


@pytest.fixture
def records() -> np.ndarray:
    found = np.random.default_rng(0).integers(4, VOCABULARY, (3000, T)).astype(np.int32)
    found[:, 0] = CLS
    found[::2, 20] = SEP
    return found


def test_what_is_hidden_and_how_often(records: np.ndarray) -> None:
    fates: Counter[str] = Counter()
    for i, record in enumerate(records):
        item = masked(record, i)
        where = item["positions"][item["weights"] == 1]
        assert len(set(where.tolist())) == len(where) == 9
        assert (record[where] >= 4).all()
        np.testing.assert_array_equal(item["targets"], record[item["positions"]])
        untouched = np.delete(np.arange(T), where)
        np.testing.assert_array_equal(item["tokens"][untouched], record[untouched])
        for seen, true in zip(item["tokens"][where], record[where], strict=True):
            fates["mask" if seen == MASK else "same" if seen == true else "random"] += 1
            assert seen == MASK or seen >= 4
    total = fates.total()
    assert total == 9 * len(records)
    for fate, share in {"mask": 0.8, "random": 0.1, "same": 0.1}.items():
        assert abs(fates[fate] / total - share) < 4 * (share * (1 - share) / total) ** 0.5 + 0.001


def test_positions_are_drawn_evenly(records: np.ndarray) -> None:
    counts = np.zeros(T, int)
    for i, record in enumerate(records):
        np.add.at(counts, masked(record, i)["positions"], 1)
    assert counts[0] == 0
    ordinary = counts[np.r_[1:20, 21:T]] / len(records)
    assert (abs(ordinary - 9 / 62.5) < 0.03).all()


def test_the_marks_of_another_tokenizer_are_never_hidden_and_one_hides() -> None:
    record = np.array([101, *range(1000, 1030), 102, *range(1030, 1060), 102], np.int32)
    marks = Marks(101, 102, 103, (0, 100, 101, 102, 103))
    for seed in range(50):
        item = mask_record(
            record,
            np.random.default_rng(seed),
            vocabulary=2000,
            masked=K,
            mask_rate=0.15,
            marks=marks,
        )
        assert (item["targets"] >= 1000).all()
        changed = item["tokens"][item["tokens"] != record]
        assert (changed == 103).sum() >= 3


def test_few_ordinary_tokens_leave_weights_of_zero() -> None:
    record = np.full(T, SEP, np.int32)
    assert masked(record, 0)["weights"].sum() == 0
    record[10:30] = 77
    item = masked(record, 0)
    assert item["weights"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert item["targets"].tolist() == [77, 77, 77, 0, 0, 0, 0, 0, 0]
    assert {name: value.dtype.name for name, value in item.items()} == {
        "tokens": "int32",
        "positions": "int32",
        "targets": "int32",
        "weights": "float32",
    }


def test_frequency_loss_is_counted_by_hand() -> None:
    records = np.array(
        [[CLS, 5, 5, 6], [CLS, 5, 7, SEP]], np.int32
    )  # 5 thrice, 6 and 7 once, 4, 8 and 9 never
    held_out = {
        "targets": np.array([[5, 9, 0]]),
        "weights": np.array([[1.0, 1.0, 0.0]], np.float32),
    }
    expected = -(log(4 / 11) + log(1 / 11)) / 2
    assert frequency_loss(records, [held_out], 10, first=4) == pytest.approx(expected)


def test_frequency_loss_counts_an_end_mark_below_the_first_id() -> None:
    records = np.array([[1, 5, 5, 0], [1, 3, 5, 0]], np.int32)
    held_out = {"targets": np.array([[5, 0]]), "weights": np.ones((1, 2), np.float32)}
    # Each of six ids gets 1 more than its count: 0 has 3, 5 has 4, and all together have 14.
    expected = -(log(3 / 14) + log(4 / 14)) / 2
    assert frequency_loss(records, [held_out], 6, first=2) == pytest.approx(expected)


def test_an_order_of_prediction_is_random_and_hides_nothing() -> None:
    record = np.array([CLS, *range(10, 29), SEP], np.int32)
    examples = [
        permute_record(record, np.random.default_rng(i), masked=8, mask_rate=0.3) for i in range(50)
    ]
    for example in examples:
        np.testing.assert_array_equal(example["tokens"], record)
        count = int(example["weights"].sum())
        assert count == len(set(example["positions"][:count])) == 6
        np.testing.assert_array_equal(
            example["targets"][:count], record[example["positions"][:count]]
        )
        assert not example["positions"][count:].any()
    firsts = {int(example["positions"][0]) for example in examples}
    assert firsts <= set(range(1, 20))
    assert len(firsts) > 10
