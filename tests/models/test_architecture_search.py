"""Architecture search in a pipeline: the stream follows from seed and losses, whatever the cut;
nothing is lost.
"""

from itertools import groupby
from threading import Event
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.models.architecture import Architecture, Block, SearchSpace, Supernet
from jvpipe.models.architecture_search import ArchitectureSearch
from tests.runtime.test_model_change import compiled_in
from tests.zoo import quick_key

SPACE = SearchSpace(("tanh", "sine"), ("none", "linear"), slots=5, fewest=3)
STEPS = 10


def params_of(architecture: Architecture, key: jax.Array) -> Any:
    """Follow from the names alone."""
    found = {}
    for name in (*architecture.names(), "head"):
        rng = np.random.default_rng(list(name.encode()))
        found[name] = {"left": rng.normal(0, 0.4, (4, 4)).astype(np.float32)}
        if name.endswith("linear"):
            found[name]["right"] = rng.normal(0, 0.4, (4, 4)).astype(np.float32)
    return found


def loss_of(architecture: Architecture) -> Any:
    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch
        for _, name, block in architecture.blocks():
            left = {"tanh": jnp.tanh, "sine": jnp.sin}[block.left](x @ params[name]["left"])
            x = x + left + (x @ params[name]["right"] if block.right == "linear" else 0.0)
        return jnp.mean((x @ params["head"]["left"] - batch) ** 2)

    return loss_fn


SUPERNET = Supernet(SPACE, Architecture((Block("tanh", "none"),) * 5), loss_of, params_of)


def batches() -> Any:
    rng = np.random.default_rng(0)
    while True:
        yield rng.normal(size=(8, 4)).astype(np.float32)


def searched(
    stages: int, **options: Any
) -> tuple[list[tuple[Architecture, float]], Any, ArchitectureSearch]:
    search = ArchitectureSearch(SUPERNET, seed=3, steps=3)
    pipe = jvpipe.Pipeline(
        search.first.loss_fn, optax.adam(1e-2), stages, 2, planner="even", **options
    )
    state = pipe.init(search.first.params, next(batches()), quick_key(0))
    found = []
    for state, metrics, architecture in search.run(pipe, state, batches(), STEPS):  # noqa: B007, B020
        found.append((architecture, float(metrics["loss"])))
    return found, pipe.params(state), search


def test_no_cut_changes_the_stream() -> None:
    found, params, search = searched(1)
    assert len(found) == STEPS
    steps = [
        (architecture, len(list(group)))
        for architecture, group in groupby(found, lambda item: item[0])
    ]
    assert [count for _, count in steps] == [3, 3, 3, 1]
    assert len({architecture for architecture, _ in steps}) == 4
    assert set(params) == {*steps[-1][0].names(), "head"}
    same, same_params, _ = searched(2)
    assert same == found
    jax.tree.map(np.testing.assert_array_equal, same_params, params)
    for i, (architecture, loss) in enumerate(search.evolution.population):
        mine = found[3 * i : 3 * i + 3]
        assert {a for a, _ in mine} == {architecture}
        assert loss == pytest.approx(np.mean([x for _, x in mine]))


def test_the_last_architecture_counts_for_whoever_stops_at_the_last_step() -> None:
    search = ArchitectureSearch(SUPERNET, seed=3, steps=2)
    pipe = jvpipe.Pipeline(search.first.loss_fn, optax.adam(1e-2), 1, 2, planner="even")
    stream = search.run(pipe, pipe.init(search.first.params, next(batches()), None), batches(), 2)
    losses = [float(next(stream)[1]["loss"]) for _ in range(2)]
    assert search.evolution.best == (search.first.architecture, pytest.approx(np.mean(losses)))


def test_a_stream_seen_before_compiles_nothing() -> None:
    searched(2)
    assert compiled_in(lambda: searched(2)) == 0


def test_whoever_stops_early_does_not_wait_for_the_next_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, released, ended = Event(), Event(), Event()

    def precompile(*arguments: Any) -> None:
        begun.set()
        released.wait(10)
        ended.set()

    monkeypatch.setattr(jvpipe.Pipeline, "precompile", precompile)
    search = ArchitectureSearch(SUPERNET, seed=3, steps=2)
    pipe = jvpipe.Pipeline(search.first.loss_fn, optax.adam(1e-2), 1, 2, planner="even")
    state = pipe.init(search.first.params, next(batches()), None)
    stream: Any = search.run(pipe, state, batches(), 4)
    next(stream)
    assert begun.wait(10)
    stream.close()
    assert not ended.is_set()
    released.set()
    assert ended.wait(10)


@pytest.mark.thorough
def test_a_search_that_is_left_keeps_its_state(tmp_path: Any) -> None:
    search = ArchitectureSearch(SUPERNET, seed=3, steps=2)
    pipe = jvpipe.Pipeline(
        search.first.loss_fn, optax.adam(1e-2), 2, 2, "pipedream", planner="even"
    )
    state = pipe.init(search.first.params, next(batches()), None)
    seen, given = [], batches()
    for state, _, architecture in search.run(pipe, state, given, 100):  # noqa: B007, B020
        seen.append(architecture)
        if len(seen) == 5:
            break
    assert len(pipe.session.model_history) == 2
    pipe.save(tmp_path / "state", state)
    other = jvpipe.Pipeline(loss_of(seen[-1]), optax.adam(1e-2), 2, 2, "pipedream", planner="even")
    again = other.restore(tmp_path / "state")
    jax.tree.map(np.testing.assert_array_equal, other.params(again), pipe.params(state))
    assert again.step == 5


def test_an_architecture_that_does_not_fit_is_told_and_the_state_stays() -> None:
    search = ArchitectureSearch(SUPERNET, seed=3, steps=1)
    first = search.first
    pipe = jvpipe.Pipeline(first.loss_fn, optax.adam(1e-2), 2, 2, planner="even")
    pipe.init(first.params, next(batches()), None)
    limit = max(peak.bytes for peak in pipe.session.compiled.peaks)
    pipe = jvpipe.Pipeline(
        first.loss_fn, optax.adam(1e-2), 2, 2, planner="even", memory_limit=limit
    )
    state = pipe.init(first.params, next(batches()), None)
    with pytest.raises(jvpipe.MemoryLimitExceeded, match="the limit"):
        for state, _, _ in search.run(pipe, state, batches(), 8):  # noqa: B007, B020
            pass
    step = state.step
    assert pipe.step(state, next(batches()))[0].step == step + 1
