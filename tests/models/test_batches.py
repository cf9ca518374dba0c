import json

import numpy as np
import pytest

from jvpipe.models.batches import fixed_batches, train_batches
from jvpipe.models.workload import Batch, Batches

N, T, B = 12, 5, 4


def noisy(record: np.ndarray, generator: np.random.Generator) -> Batch:
    return {
        "tokens": record,
        "noise": generator.integers(0, 2**31, 2),
        "weights": np.ones(2, np.float32),
    }


@pytest.fixture
def records() -> np.ndarray:
    return np.arange(N * T, dtype=np.int32).reshape(N, T)


def take(batches: Batches, count: int) -> list[Batch]:
    return [next(batches) for _ in range(count)]


def same(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def test_an_epoch_holds_each_record_once_in_an_order_of_its_own(records: np.ndarray) -> None:
    batches = train_batches(records, noisy, seed=3, batch_size=B)
    epochs = [
        np.concatenate([batch["tokens"] for batch in take(batches, N // B)]) for _ in range(3)
    ]
    assert all(sorted(epoch[:, 0]) == list(records[:, 0]) for epoch in epochs)
    orders = {tuple(epoch[:, 0]) for epoch in epochs} | {tuple(records[:, 0])}
    assert len(orders) == 4


def test_a_record_has_other_noise_in_each_epoch(records: np.ndarray) -> None:
    batches = train_batches(records, noisy, seed=3, batch_size=N)
    first, second = (
        {t[0]: n[0] for t, n in zip(b["tokens"], b["noise"], strict=True)} for b in take(batches, 2)
    )
    assert all(first[record] != second[record] for record in first)


def test_seeds_give_orders(records: np.ndarray) -> None:
    one, again, other = (take(train_batches(records, noisy, seed, B), 3) for seed in (0, 0, 1))
    assert all(map(same, one, again))
    assert not all(map(same, one, other))


@pytest.mark.parametrize("position", [0, 2, 7])
def test_a_saved_position_continues_with_the_same_batches(
    records: np.ndarray, position: int
) -> None:
    batches = train_batches(records, noisy, seed=5, batch_size=B)
    take(batches, position)
    state = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 4)
    fresh = train_batches(records, noisy, seed=5, batch_size=B)
    fresh.set_state(state)
    assert all(map(same, take(fresh, 4), expected))
    batches.set_state(state)  # also backwards, on an iterator that has run ahead
    assert all(map(same, take(batches, 4), expected))


def test_of_lazy_batches_the_examples_are_made_that_are_read(records: np.ndarray) -> None:
    made: list[int] = []

    def seen(record: np.ndarray, generator: np.random.Generator) -> Batch:
        made.append(int(record[0]))
        return noisy(record, generator)

    whole = train_batches(records, noisy, seed=5, batch_size=B)
    take(whole, 4)
    lazy = train_batches(records, seen, seed=5, batch_size=B).lazily()
    lazy.set_state(json.loads(json.dumps(whole.get_state())))
    for _ in range(3):
        expected, found = next(whole), next(lazy)
        made.clear()
        np.testing.assert_array_equal(found["noise"][1:][:2], expected["noise"][1:3])
        np.testing.assert_array_equal(found["tokens"][1:3], expected["tokens"][1:3])
        assert made == [int(tokens[0]) for tokens in expected["tokens"][1:3]]
        assert same({name: np.asarray(leaf) for name, leaf in found.items()}, expected)
    assert lazy.get_state() == whole.get_state()


def test_fixed_batches_are_whole_and_the_same_every_time(records: np.ndarray) -> None:
    one, two = (fixed_batches(records, noisy, 5) for _ in range(2))
    assert all(map(same, one, two))
    assert [batch["tokens"].shape for batch in one] == [(5, T), (5, T)]
    np.testing.assert_array_equal(np.concatenate([batch["tokens"] for batch in one]), records[:10])


def test_too_few_records_are_filled_with_weight_zero(records: np.ndarray) -> None:
    (batch,) = fixed_batches(records[:3], noisy, 5)
    assert batch["tokens"].shape == (5, T)
    assert batch["weights"].sum(1).tolist() == [2, 2, 2, 0, 0]
