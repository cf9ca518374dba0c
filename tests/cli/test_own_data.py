"""The batches of a user's model go on where they were, whether their iterator knows its place or
not.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jvpipe.cli.own_model import own_data, shapes
from jvpipe.models.user_batches import UserBatches
from tests.grid import grid
from tests.own import Ends, Full, Plain


def data(model: Any, seed: int = 0, batch_size: int = 4) -> Any:
    return own_data("own.py:mine", model, None, Path(), seed, batch_size)


class Loader:
    """An iterator that tells its place in bytes, as Grain's older loader does."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Any:
        self.at += 1
        return {"x": np.full((4, 1), self.at)}

    def get_state(self) -> bytes:
        return bytes([200, self.at])

    def set_state(self, state: bytes) -> None:
        self.at = state[1]


class Loading(Plain):
    def batches(self, seed: int, batch_size: int) -> Iterator[Any]:
        return Loader()


@pytest.mark.parametrize(
    "model", grid([plain := Plain(), Full(), loading := Loading()], plain, loading)
)
def test_batches_go_on_where_they_were(model: Any) -> None:
    one, other = data(model), data(model)
    seen = [next(one.train)["x"] for _ in range(2)]
    np.testing.assert_array_equal(seen[0], one.example["x"])
    place = json.loads(json.dumps(one.train.get_state()))
    other.train.set_state(place)
    for _ in range(3):
        np.testing.assert_array_equal(next(one.train)["x"], next(other.train)["x"])
    assert one.digest == other.digest
    assert isinstance(model, Loading) or data(model, seed=1).digest != one.digest


def test_a_place_of_another_kind_is_refused() -> None:
    with pytest.raises(
        ValueError, match="has no position of its own, but the run was saved with one"
    ):
        data(Plain()).train.set_state({"place": {"next_index": 1}})
    with pytest.raises(ValueError, match="has its own position, but the run was saved without it"):
        data(Full()).train.set_state({"batches": 1})


def test_batches_go_back_or_say_that_they_cannot() -> None:
    again, once = UserBatches("again()", [*"abcd"]), UserBatches("once()", iter("abcd"))
    for batches in (again, once):
        assert [next(batches) for _ in range(3)] == [*"abc"]
        batches.set_state({"batches": 3})
        assert (batches.peek(), next(batches)) == ("d", "d")
    again.set_state({"batches": 1})
    assert (next(again), again.get_state()) == ("b", {"batches": 2})
    with pytest.raises(ValueError, match=r"once\(\) is at batch 4 and cannot go back to 1: give"):
        once.set_state({"batches": 1})


def test_batches_that_end_are_told_so() -> None:
    train = data(Ends()).train
    assert len([next(train), next(train)]) == 2
    with pytest.raises(
        ValueError, match=r"batches\(seed=0, batch_size=4\) has no more batches: make it endless"
    ):
        next(train)


@pytest.mark.parametrize("found", [None, {"x": np.zeros((4, 2))}])
def test_held_out_batches_that_are_no_list_are_told(found: Any) -> None:
    class Wrong(Plain):
        def held_out(self) -> Any:
            return found

    told = r"--model own\.py:mine: held_out\(\) must return a list of batches, not "
    with pytest.raises(ValueError, match=told):
        data(Wrong())


def test_what_are_no_batches() -> None:
    class Wrong(Plain):
        def batches(self, seed: int, batch_size: int) -> Any:
            return found

    found: Any = 3
    with pytest.raises(ValueError, match="should return an iterator of batches, not int"):
        data(Wrong())
    found = [np.zeros((8, 2))]
    with pytest.raises(
        ValueError,
        match=r"gives arrays whose first axis is \[8\]: it must be the number of examples, 4",
    ):
        data(Wrong())
    with pytest.raises(ValueError, match="first axis is"):
        shapes("own.py:mine", Wrong(), 4)
    with pytest.raises(ValueError, match=r"--data text\.txt is for jvpipe's own models"):
        own_data("own.py:mine", Plain(), Path("text.txt"), Path(), 0, 4)
