"""The ledger tells the truth: before every task, what it counts is what JAX holds; and after random
graphs, nothing.
"""

import gc
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jvpipe
from jvpipe.ir.buffers import HOST
from jvpipe.runtime.engine.binding import Bound, Instruction
from tests.end_to_end.test_fates import MICRO, drawn, trained
from tests.zoo import CASES, Case, draws, dropout, mean_square, quick_key, regression_batch

D, B = 4, 2


def held(baseline: set[int], devices: tuple[Any, ...]) -> list[int]:
    """Bytes that JAX holds on each device and last on the host, less what was there before."""
    total = [0] * (len(devices) + 1)
    for array in jax.live_arrays():
        if id(array) not in baseline:
            (device,) = array.devices()
            place = HOST if array.sharding.memory_kind == "pinned_host" else devices.index(device)
            total[place] += array.nbytes
    return total


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("gpipe", 2)])
def test_at_every_task_its_bytes_are_those_that_jax_holds(schedule: str, stages: int) -> None:
    m = CASES["pre-norm"]()
    batch = jax.tree.map(lambda x: np.resize(x, (2 * MICRO, *x.shape[1:])), m.batch)
    graph = trained(m, 1, "gpipe")[2].session.graph
    layers = len(graph.layers)
    plan = drawn(graph, (layers // 2, layers - layers // 2), seed=5)
    gc.collect()  # an array that is freed meanwhile would lend its id to a new one
    baseline = {id(array) for array in jax.live_arrays()}
    pipe = jvpipe.Pipeline(m.loss_fn, optax.adamw(1e-2), plan, MICRO, schedule)
    state = pipe.init(m.params, batch, m.rng)
    compiled, live, found = pipe.session.compiled, pipe.ledger.live, []

    def watching(it: Instruction) -> Instruction:
        def run(*args: Any) -> Any:
            expected = list(live)
            expected[it.target] -= it.born_bytes
            found.append((it.row, expected, held(baseline, compiled.devices)))
            return it.run(*args)

        return it if it.feed else it._replace(run=run)

    compiled.bound_step = Bound(compiled.lowered, tuple(map(watching, compiled.step.instructions)))
    state, metrics = pipe.step(state, batch)
    del metrics
    assert {"F", "B", "R", "OUT", "FREE", "IN", "SEND", "ZERO", "LOSS", "U"} <= {
        row.kind for row, *_ in found
    }
    for row, counted, real in found:
        assert counted == real, f"before {row}"


def random_case(seed: int) -> Case:
    """A loss of random layers: products, dropout, gates, additions and concatenations of earlier
    results.
    """
    draw, weights = random.Random(seed), draws(seed)
    kinds = [
        draw.choice(["dense", "dropout", "gate", "skip", "concat"])
        for _ in range(draw.randint(3, 6))
    ]
    earlier = [draw.randint(0, i) for i in range(len(kinds))]
    params = [{"w": weights(D * (1 + (kind == "concat")), D), "b": weights(D)} for kind in kinds]

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        found = [batch["x"]]
        for i, (kind, p, j) in enumerate(zip(kinds, params, earlier, strict=True)):
            x = found[-1]
            x = jnp.concatenate([x, found[j]], -1) if kind == "concat" else x
            x = jnp.tanh(x @ p["w"] + p["b"][None])
            match kind:
                case "dropout":
                    x = dropout(x, jax.random.fold_in(rng, i))
                case "gate":
                    x = x * jnp.exp(-(found[j] ** 2))
                case "skip":
                    x = x + found[j]
            found.append(x)
        return mean_square(found[-1], batch["y"])

    return Case(loss_fn, params, regression_batch(B, D), quick_key(seed))


@pytest.mark.usefixtures("copies_never_late")
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 10**6),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    stages=st.integers(1, 3),
)
def test_random_fates_of_random_graphs_are_exact_and_leak_nothing(
    seed: int, schedule: str, stages: int
) -> None:
    m = random_case(seed)
    params, losses, plain = trained(m, 1, "gpipe")
    layers = len(plain.session.graph.layers)
    stages = min(stages, layers)
    cuts = tuple(layers // stages + (s < layers % stages) for s in range(stages))
    ours = trained(
        m, drawn(plain.session.graph, cuts, seed), schedule
    )  # it looks at the ledger after every step
    assert ours[1] == losses
    for a, b in zip(ours[0], params, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_model_state_that_is_written_and_never_read_does_not_pile_up(schedule: str) -> None:
    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        x = jnp.tanh(batch @ params[0]) @ params[1]
        return jnp.mean(x**2), jnp.mean(x)

    params, batch = [0.5 * np.eye(D, dtype=np.float32)] * 2, np.ones((MICRO, D), np.float32)
    pipe = jvpipe.Pipeline(
        loss_fn, optax.sgd(0.1), 2, MICRO, schedule, planner="even", has_state=True
    )
    state = pipe.init(params, batch, None, np.float32(0))
    for _ in range(2):
        state, _ = pipe.step(state, batch)
        jax.block_until_ready(state)
        assert sum(pipe.ledger.live) == sum(x.nbytes for x in state.arrays)
