"""Any function of the parameters, computed where they lie, gives what one device gives; the oracle
is `jax.jit`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jvpipe
from jvpipe.ir.weighted import Weighted
from jvpipe.runtime.engine.tensors import Limits
from tests.end_to_end.test_exactness import batch_of
from tests.grid import grid
from tests.runtime.test_migrate import MICRO, started
from tests.session.tiny import BATCH, begun
from tests.zoo import CASES, Case

Tree = Any


def function_of(m: Case) -> Callable[..., Tree]:
    """All that a loss gives, and integers; it draws what it draws from a key that it closes
    over.
    """

    def function(params: Tree, *rest: Tree) -> Tree:
        values = jax.tree.map(
            lambda x: x.total if isinstance(x, Weighted) else x,
            m.loss_fn(params, *rest, m.rng),
            is_leaf=lambda x: isinstance(x, Weighted),
        )
        tops = [jnp.argmax(x) for x in jax.tree.leaves(params)[:1]]
        return {"values": values, "top": tops, "given": jax.tree.leaves(rest)[0]}

    return function


def on_one_device(m: Case, pipe: jvpipe.Pipeline, state: jvpipe.State, batch: Tree) -> Tree:
    given = [pipe.model_state(state)] if m.has_state else []
    return jax.jit(function_of(m))(pipe.params(state), *given, batch)


def assert_near(found: Tree, expected: Tree) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    grid(
        [
            ("mlp", "interleaved", {}),
            ("mlp", "2bw", {}),
            ("mlp", "1f1b", {"replicas": (2, 1)}),
            ("mlp", "1f1b", {"state_fates": {"*": "swap"}}),
            ("scanned", "zb-v", {}),
            ("resnet", "1f1b", {}),
            ("pre-norm", "1f1b", {}),
            ("three-readers", "gpipe", {}),
            ("with-aux", "1f1b", {}),
            ("unused", "1f1b", {}),
            ("linen", "1f1b", {}),
            ("experts", "1f1b", {}),
        ],
        ("mlp", "interleaved", {}),
        ("mlp", "2bw", {}),
    ),
)
def test_any_function_gives_what_one_device_gives(
    name: str, schedule: str, options: dict[str, Any]
) -> None:
    m = CASES[name]()
    pipe, state = started(m, 2, schedule, **options)
    batch, function = batch_of(m, MICRO), function_of(m)
    for after, _ in pipe.run(state, [batch] * 2):  # in flight, under a schedule that never drains
        state = after
        live = list(pipe.ledger.live)
        assert_near(pipe.predict(state, batch, function), on_one_device(m, pipe, state, batch))
        assert pipe.ledger.live == live
    smaller = jax.tree.map(lambda x: x[:3], batch)
    assert_near(pipe.predict(state, smaller, function), on_one_device(m, pipe, state, smaller))
    jax.block_until_ready(pipe.step(state, batch))  # the state is whole


def test_layers_run_where_their_parameters_lie_also_after_these_have_moved() -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, jvpipe.Plan.from_cuts([3, 2]))
    batch, places = batch_of(m, MICRO), []
    function = lambda params, batch: m.loss_fn(params, batch, None)  # noqa: E731
    for plan in (pipe.plan, jvpipe.Plan.from_cuts([1, 4])):
        state = pipe.migrate(state, plan)
        pipe.predict(state, batch, function)
        (compiled,) = pipe.session.predictions.values()
        params = [buffer.place for buffer in compiled.persistent]
        places.append(params)
    assert places == [[0] * 6 + [1] * 4, [0] * 2 + [1] * 8]


def test_what_is_read_counts_against_the_limit_beside_all_that_lies_there() -> None:
    pipe, state = begun()
    function = lambda params, batch: sum(jnp.sum(w) for w in params)  # noqa: E731
    expected = function(pipe.params(state), BATCH)
    pipe.session.limits = Limits(max(pipe.ledger.live) - 1)
    with pytest.raises(jvpipe.MemoryLimitExceeded) as refused:
        pipe.predict(state, BATCH, function)
    pipe.session.limits = Limits(refused.value.smallest_limit_bytes)
    np.testing.assert_allclose(pipe.predict(state, BATCH, function), expected, rtol=1e-6)


def doubled_until_large(params: Any, x: jax.Array) -> jax.Array:
    """A loop that no gradient can go back through."""
    return jax.lax.while_loop(lambda x: jnp.max(jnp.abs(x)) < 100, lambda x: 2 * x, x @ params[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda params, batch: jnp.argmax(batch["x"] @ params[0] @ params[1], -1),
        lambda params, batch: [params[1] > 0, jnp.any(params[0] > 1)],
        lambda params, batch: doubled_until_large(params, batch["x"]),
    ],
)
def test_a_function_needs_no_gradient(function: Any) -> None:
    pipe, state = begun()
    found = pipe.predict(state, BATCH, function)
    assert_near(found, jax.jit(function)(pipe.params(state), BATCH))


def test_what_is_no_function_of_the_parameters_is_refused() -> None:
    pipe, state = begun()
    with pytest.raises(ValueError, match="the function depends on no parameter"):
        pipe.predict(state, BATCH, lambda params, batch: jnp.ones(3))
    with pytest.raises(ValueError, match="the function returns no arrays, it returns None"):
        pipe.predict(state, BATCH, lambda params, batch: None)
    with pytest.raises(ValueError, match=r"leaf of the prediction '1' is a key: return jax"):
        pipe.predict(state, BATCH, lambda params, batch: (params[0], jax.random.key(0)))
    with pytest.raises(ValueError, match=r"function must be a function of \(params, batch\)"):
        pipe.predict(state, BATCH, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["a", 10**30, object()])
def test_what_no_device_holds_is_refused_with_its_path(value: Any) -> None:
    pipe, state = begun()
    with pytest.raises(ValueError, match="leaf of the prediction 'top' is "):
        pipe.predict(state, BATCH, lambda params, batch: {"x": params[0], "top": value})
