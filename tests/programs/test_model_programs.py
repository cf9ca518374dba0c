"""The programs of all layers: what forwards keep, and backwards with and without sums to add to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.ir.fates import Fates
from jvpipe.ir.plan import Plan
from jvpipe.planners.user_fates import with_fates
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import (
    backward_program,
    forward_program,
    layer_programs,
    single_backward_program,
)
from jvpipe.programs.store import shared_store
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss

W = np.eye(3, dtype=np.float32)
X = np.ones((2, 3), np.float32)


def loss_fn(params: list[jax.Array], x: jax.Array, rng: None) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]))


@pytest.fixture(scope="module")
def traced() -> Traced:
    return build_graph(trace_loss(loss_fn, [W, W], X, None), cuts=[])


def only(traced: Traced, share: Fates | str) -> LayerPrograms:
    (programs,) = layer_programs(shared_store(), traced, share)  # type: ignore[arg-type]
    return programs


def test_a_forward_leaves_what_is_kept(traced: Traced) -> None:
    left = {
        share: len(only(traced, share).signature.residuals) for share in ("all", "half", "nothing")
    }
    assert left == {"all": 2, "half": 1, "nothing": 0}
    plan = with_fates(traced.graph, Plan.from_cuts([1]), {"*/dot_general_0": "recompute"})
    resolved = only(traced, Fates.of(traced.graph, plan)).signature
    assert [array.name for array in resolved.residuals] == ["dot_general_1"]


def test_a_backward_overwrites_the_sums_that_it_adds_to_and_one_alone_has_none(
    traced: Traced,
) -> None:
    programs = only(traced, "all")
    adding, alone = backward_program(programs), single_backward_program(programs)
    assert len(adding.inputs) - len(alone.inputs) == len(adding.donated) == 2
    assert adding.key != alone.key
    forward = forward_program(programs)
    out = list(forward.fn(*map(jnp.asarray, [W, W, X])))
    values = {"input": [W, W, X], "output": out[:1], "residual": out[1:]}
    given = [jnp.asarray(values[kind][i]) for kind, i in programs.signature.sources]
    zeros, ones = ([jnp.full_like(W, n) for _ in range(2)] for n in (0, 1))
    plain = jax.grad(loss_fn)([jnp.asarray(W), jnp.asarray(W)], jnp.asarray(X), None)
    for got, expected in zip(alone.fn(*given), plain, strict=False):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    for got, fresh in zip(adding.fn(*given, *ones), adding.fn(*given, *zeros), strict=False):
        if np.ndim(got):
            np.testing.assert_allclose(got, fresh + 1, rtol=1e-6)


def test_a_forward_that_prints_prints_once() -> None:
    def loud(params: list[jax.Array], x: jax.Array, rng: None) -> jax.Array:
        loss = jnp.sum(x @ params[0])
        jax.debug.print("{}", loss)
        return loss

    programs = only(build_graph(trace_loss(loud, [W], X, None), cuts=[]), "all")
    first, again = forward_program(programs), forward_program(programs, recompute=True)
    assert (first.calls_host, again.calls_host) == (True, False)
    assert first.key != again.key
