"""What a name of a hub stands for: folders that are fetched, texts that are streamed and go on
where they were.
"""

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jvpipe.models import hub, load
from jvpipe.models.checkpoints import from_folder
from jvpipe.models.streams import Rows, read_head
from tests.models.test_weights import WEIGHTS

ROWS = [{"text": " ".join(f"word{i + k}" for k in range(20))} for i in range(120)]


class Stream:
    """As a data set of Hugging Face that is streamed: rows, and how many were taken."""

    def __init__(self, rows: Any, taken: int = 0) -> None:
        self.rows, self.taken = rows, taken

    def __iter__(self) -> Any:
        while self.taken < len(self.rows):
            self.taken += 1
            yield self.rows[self.taken - 1]

    def skip(self, count: int) -> "Stream":
        return Stream(self.rows[count:])

    def state_dict(self) -> Any:
        return {"taken": self.taken}

    def load_state_dict(self, state: Any) -> None:
        self.taken = state["taken"]


def real(rows: Any) -> Any:
    """One of the library itself, in two parts."""
    return pytest.importorskip("datasets").Dataset.from_list(rows).to_iterable_dataset(2)


@pytest.fixture(params=[Stream, real])
def stream_of(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param


def test_a_stream_has_no_end_and_goes_on_where_it_was(stream_of: Callable[[Any], Any]) -> None:
    opened = lambda: stream_of([{"text": str(i)} for i in range(7)]).skip(0)  # noqa: E731
    rows = iter(Rows(opened, skipped=2))
    seen = [next(rows)["text"] for _ in range(12)]
    assert seen == [*"23456", *"23456", *"23"]
    for taken in (0, 3, 5, 9):
        one, other = iter(Rows(opened, 2)), iter(Rows(opened, 2))
        for _ in range(taken):
            next(one)
        other.set_state(json.loads(json.dumps(one.get_state())))
        assert [next(other)["text"] for _ in range(3)] == seen[taken : taken + 3]


def test_the_first_rows_are_held_out() -> None:
    head = read_head(lambda: Stream(ROWS), "owner/name")
    assert [*head.held_out, *head.first] == ROWS
    assert 10 <= len(head.held_out) <= 20
    with pytest.raises(ValueError, match="'owner/name' has 1 rows"):
        read_head(lambda: Stream(ROWS[:1]), "owner/name")


def test_a_long_first_row_is_not_the_whole_head() -> None:
    head = read_head(lambda: Stream(ROWS), "owner/name", characters=10)
    assert [*head.held_out, *head.first] == ROWS[:2]


@pytest.fixture
def on_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream_of: Callable[[Any], Any]
) -> list[Any]:
    """A hub that has one data set; what was asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = []

    def load_dataset(name: str, config: str | None, **options: Any) -> Any:
        asked.append((name, config, options["revision"]))
        if name != "owner/texts":
            raise ConnectionError("the hub has no\nsuch data set")
        return stream_of(ROWS)

    monkeypatch.setitem(
        __import__("sys").modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset)
    ) if stream_of is Stream else monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def test_a_streamed_text_is_trained_on_and_resumed(on_hub: list[Any], tmp_path: Path) -> None:
    workload = load("gpt2", "tiny", tokens=16, vocabulary=400)
    name = Path("owner/texts@main:small")
    one, two = (workload.open_data(name, tmp_path, 0, 4) for _ in range(2))
    assert set(on_hub) == {("owner/texts", "small", "main")}
    assert one.digest == two.digest
    seen = [next(one.train) for _ in range(3)]
    two.train.set_state(json.loads(json.dumps(one.train.get_state())))
    for _ in range(40):  # beyond the end of the stream
        jax.tree.map(np.testing.assert_array_equal, next(one.train), next(two.train))
    other = workload.open_data(name, tmp_path, 1, 4)
    assert not np.array_equal(next(other.train)["tokens"], seen[0]["tokens"])
    held_out = {row.tobytes() for batch in one.held_out for row in batch["tokens"]}
    assert not held_out & {row.tobytes() for batch in seen for row in batch["tokens"]}


def test_what_no_hub_has_is_told_in_one_line(on_hub: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file or folder owner/none, .*has no") as refused:
        load("gpt2", "tiny").open_data(Path("owner/none"), tmp_path, 0, 4)
    assert "\n" not in str(refused.value)


def test_a_model_is_fetched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, *, revision: str | None, allow_patterns: Any) -> str:
        if (name, revision) != ("owner/gpt2", "0a1b"):
            raise OSError("you are offline")
        assert {"*.safetensors", "*config.json"} <= set(allow_patterns)
        return str(WEIGHTS / "gpt2")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    workload, _ = from_folder("owner/gpt2@0a1b", jax.random.key(0))
    there, _ = from_folder(WEIGHTS / "gpt2", jax.random.key(0))
    assert workload.config == there.config
    assert hub.model_folder(WEIGHTS) == WEIGHTS
    with pytest.raises(ValueError, match=r"\(you are offline\): .* hf download owner/other"):
        from_folder("owner/other", jax.random.key(0))
