"""A loss on slices of a micro-batch: the layers of the whole, whose losses make the whole's; masks are the whole's."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.ir.examples import Examples, Over, divided
from jvpipe.ir.weighted import Weighted
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.slices import batching, sliced
from jvpipe.trace.spread import CoupledError
from tests.sequential import Sequential
from tests.zoo import CASES, Case, mlp

MANY = 6


def batch_of(case: Case, size: int = MANY) -> Any:
    return jax.tree.map(lambda x: np.resize(x, (MANY, *x.shape[1:]))[:size], case.batch)


def traced(case: Case) -> Traced:
    loss = trace_loss(case.loss_fn, case.params, batch_of(case), case.rng, case.state, **case.options)
    return build_graph(loss)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "threefry", "chained-keys", "with-aux"])
def test_slices_make_the_whole(name: str, parts: int) -> None:
    case = CASES[name]()
    model = traced(case)
    whole = Sequential(model, optimize=False).run(case.params, batch_of(case), case.rng, case.state)
    slices = [e for e in divided(MANY, parts) if e]
    loss, gradients = 0.0, [np.zeros_like(g) for g in whole.gradients]
    for e in slices:
        part = sliced(model, e)
        batch = jax.tree.map(lambda x, e=e: x[e.start : e.stop], batch_of(case))
        out = Sequential(part, optimize=False).run(case.params, batch, case.rng, case.state)
        loss += float(out.loss) * (1.0 if model.loss.weighted else e.size / MANY)
        gradients = [a + np.asarray(b) for a, b in zip(gradients, out.gradients, strict=True)]
    np.testing.assert_allclose(loss, float(whole.loss), rtol=1e-5)
    for a, b in zip(gradients, whole.gradients, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-4, atol=1e-6)


def test_layers_alike_but_for_their_masks_share_programs() -> None:
    model = traced(mlp())
    first, second = (sliced(model, e) for e in (Examples(0, 2), Examples(2, 4)))
    assert [a.structure == b.structure for a, b in zip(first.bodies, second.bodies, strict=True)] == [True] * 5


def test_finds_how_edges_and_aux_lie() -> None:
    base = mlp()

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
        aux = jnp.sum(batch["y"]), jnp.mean(batch["x"], 0), batch["x"][:, 0]
        return base.loss_fn(params, batch, rng), aux

    found = batching(traced(replace(base, loss_fn=loss_fn, has_aux=True)), 2)
    assert [(spread.over, spread.axis) for spread in found.tensors] == [(Over.ALONG, 0)] * 4
    assert [spread.over for spread in found.aux] == [Over.SUM, Over.MEAN, Over.ALONG]


def refused(loss_fn: Any, match: str, **options: Any) -> None:
    case = mlp(2)
    loss = trace_loss(
        lambda *given: loss_fn(*given), case.params, batch_of(case), None, options.pop("state", None), **options
    )
    with pytest.raises(CoupledError, match=match):
        batching(build_graph(loss), 2)


def test_a_loss_that_slices_do_not_make_is_refused_with_the_cure() -> None:
    def made(params: Any, batch: Any) -> jax.Array:
        return batch["x"] @ params[0]["w"] @ params[1]["w"]

    refused(lambda p, b, _: jnp.sum(made(p, b)), "a mean over its examples")
    refused(lambda p, b, _: jnp.sum(made(p, b)) / jnp.sum(b["y"]), "jvpipe.Weighted")
    refused(lambda p, b, _: Weighted(jnp.mean(made(p, b)), jnp.float32(1.0)), "sums over its items")
    refused(lambda p, b, _: (jnp.mean(made(p, b)), jnp.max(b["y"])), "leaf 0 of aux", has_aux=True)
    state = np.zeros((MANY, 2), np.float32)
    refused(
        lambda p, s, b, _: (jnp.mean(made(p, b)), s + b["y"][:, :2]),
        "does not take 2 examples|has a part for each",
        has_state=True,
        state=state,
    )


def test_a_loss_that_fixes_its_number_of_examples_is_refused() -> None:
    refused(lambda p, b, _: jnp.mean((b["x"] @ p[0]["w"] @ p[1]["w"]).reshape(MANY, -1)), "does not take 2 examples")
