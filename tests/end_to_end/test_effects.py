"""What a loss prints or calls back happens once per micro-batch, in the forward; what has no order
there is refused.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jvpipe

D, DEPTH, MICRO = 4, 3, 2
PARAMS = [0.5 * np.eye(D, dtype=np.float32) + 0.1 for _ in range(DEPTH)]
BATCH = np.random.default_rng(0).normal(size=(4, D)).astype(np.float32)


class Heard:
    """A loss that tells which layer has run: plainly, in a branch, or in a loop of two."""

    def __init__(self) -> None:
        self.count = Counter[int]()

    def tell(self, layer: int, x: jax.Array) -> None:
        jax.debug.callback(lambda _: self.count.update([layer]), jnp.sum(x))

    def loss_fn(self, params: Any, batch: Any, rng: Any) -> jax.Array:
        def twice(i: Any, x: jax.Array) -> jax.Array:
            self.tell(2, x)
            return x * 0.5

        x = jnp.tanh(batch @ params[0])
        self.tell(0, x)
        x = jax.lax.cond(
            jnp.sum(x) < 1e9, lambda x, w: (self.tell(1, x), x @ w)[1], lambda x, w: x, x, params[1]
        )
        x = jax.lax.fori_loop(0, 2, twice, jnp.tanh(x) @ params[2])
        return jnp.mean(x**2)

    def after(self, state: Any) -> dict[int, int]:
        jax.block_until_ready(state)
        jax.effects_barrier()
        told, self.count = dict(self.count), Counter()
        return told


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fates": {"*": "recompute"}},
        {"checkpoint": "always"},
        {"planner": "jvpipe", "memory_limit": "1GB"},
    ],
    ids=["kept", "computed again in the backward", "computed again by stages", "timed"],
)
def test_a_callback_runs_once_per_micro_batch(options: Any) -> None:
    heard = Heard()
    options = {"planner": "even", "stages": 2, "microbatches": MICRO} | options
    pipe = jvpipe.Pipeline(heard.loss_fn, optax.sgd(0.1), **options)
    state = pipe.init(PARAMS, BATCH, None)
    assert heard.after(state) == {}
    state, _ = pipe.step(state, BATCH)
    assert heard.after(state) == {0: MICRO, 1: MICRO, 2: 2 * MICRO}
    assert heard.after(pipe.evaluate(state, BATCH)) == {0: MICRO, 1: MICRO, 2: 2 * MICRO}


def hears(told: Counter[str], when: str, x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda _: told.update([when]), jnp.sum(x))
    return x


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fates": {"*": "recompute"}},
        {"schedule": "zb-h1"},
        {"planner": "jvpipe", "memory_limit": "1GB"},
    ],
    ids=["kept", "computed again", "in halves", "timed"],
)
def test_what_a_derivative_rule_prints_is_printed_once_per_micro_batch(options: Any) -> None:
    told = Counter[str]()

    @jax.custom_vjp
    def spy(x: jax.Array) -> jax.Array:
        return x

    spy.defvjp(
        lambda x: (hears(told, "forward", x), None), lambda _, g: (hears(told, "backward", g),)
    )

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(spy(jnp.tanh(batch @ params[0])) @ params[1]) ** 2)

    options = {"planner": "even", "stages": 2, "microbatches": MICRO} | options
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), **options)
    state = pipe.init(PARAMS[:2], BATCH, None)
    jax.effects_barrier()
    assert not told
    jax.block_until_ready(pipe.step(state, BATCH)[0])
    jax.effects_barrier()
    assert told == {"forward": MICRO, "backward": MICRO}


def test_each_replica_calls_back_with_its_own_examples() -> None:
    told: list[tuple[int, ...]] = []

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = jnp.tanh(batch @ params[0])
        jax.debug.callback(lambda x: told.append(x.shape), x)
        jax.debug.callback(lambda mean: told.append(mean.shape), jnp.mean(x))
        return jnp.mean(x @ params[1])

    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), 2, MICRO, planner="even", replicas=(2, 1))
    state, _ = pipe.step(pipe.init(PARAMS[:2], BATCH, None), BATCH)
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert Counter(told) == {(1, D): 2 * MICRO, (): 2 * MICRO}


def test_callbacks_change_no_bit_whatever_is_kept() -> None:
    def run(**options: Any) -> list[np.ndarray]:
        pipe = jvpipe.Pipeline(
            Heard().loss_fn, optax.sgd(0.1), planner="even", microbatches=MICRO, **options
        )
        state, _ = pipe.step(pipe.init(PARAMS, BATCH, None), BATCH)
        return pipe.params(state)

    np.testing.assert_array_equal(run(stages=2), run(stages=1, fates={"*": "recompute"}))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: io_callback(lambda _: None, None, x), "io_callback"),
        (lambda x: jax.debug.print("{}", x, ordered=True), r"an ordered jax\.debug\.print"),
        (lambda x: jax.debug.callback(print, x, ordered=True), r"an ordered jax\.debug\.callback"),
    ],
)
def test_effects_that_have_no_place_are_refused_when_tracing(call: Any, named: str) -> None:
    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch @ params[0]
        call(jnp.sum(x))
        return jnp.mean(x @ params[1])

    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), microbatches=MICRO)
    with pytest.raises(
        ValueError,
        match=f"the loss calls {named}, .*: use jax.debug.callback .*or return the values",
    ):
        pipe.init(PARAMS[:2], BATCH, None)


OUTSIDE = jax.new_ref(jnp.zeros(()))


def adding(ref: Any, x: jax.Array) -> jax.Array:
    """Adds the mean of `x` to a mutable array, and returns the sum."""
    ref[...] = ref[...] + jnp.mean(x)
    return ref[...]


@pytest.mark.parametrize(
    ("adds", "message"),
    [
        (
            lambda x: adding(jax.new_ref(jnp.zeros(())), x),
            r"the loss makes a mutable array .*float32\[\].*: use plain arrays",
        ),
        (
            lambda x: adding(OUTSIDE, x),
            r"the loss closes over a mutable array .*float32\[\].*: carry its value as model state",
        ),
    ],
)
def test_mutable_arrays_are_refused_when_tracing(adds: Any, message: str) -> None:
    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = jnp.tanh(batch @ params[0])
        return jnp.mean(x @ params[1]) + jax.jit(adds)(x)

    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), microbatches=MICRO)
    with pytest.raises(ValueError, match=message):
        pipe.init(PARAMS[:2], BATCH, None)
