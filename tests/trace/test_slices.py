"""A loss on slices of a micro-batch: the layers of the whole, whose losses make the whole's; masks
are the whole's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.ir.examples import Examples, Over, divided
from jvpipe.ir.weighted import Weighted
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.slices import sliced, taken_apart
from tests.grid import grid
from tests.sequential import Sequential
from tests.zoo import CASES, Case, mlp

MANY = 6


def batch_of(case: Case, size: int = MANY) -> Any:
    return jax.tree.map(lambda x: np.resize(x, (MANY, *x.shape[1:]))[:size], case.batch)


def traced(case: Case) -> Traced:
    loss = trace_loss(
        case.loss_fn, case.params, batch_of(case), case.rng, case.state, **case.options
    )
    return build_graph(loss)


def counted() -> Case:
    """A masked mean, given back as one with its count, decay beside it; a slice may have nothing to
    count.
    """
    case = mlp(3)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Weighted:
        x = jnp.tanh(batch["x"] @ params[0]["w"]) @ params[1]["w"]
        loss = jnp.sum(jnp.where(batch["mask"][:, None], x, 0.0) ** 2) / jnp.sum(
            batch["mask"], dtype=jnp.float32
        )
        count = jnp.sum(batch["mask"]).astype(jnp.float32)
        return Weighted((loss + 0.1 * jnp.sum(params[2]["w"] ** 2)) * count, count)

    return replace(
        case,
        loss_fn=loss_fn,
        batch=case.batch | {"mask": np.array([True, False, True, True, False, False])},
    )


def weighed() -> Case:
    """A mean over whole weights, guarded against none, and given back with their sum."""
    case = mlp(3)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Weighted:
        x = jnp.tanh(batch["x"] @ params[0]["w"]) @ params[1]["w"]
        weights = batch["weights"].astype(jnp.float32)
        mean = jnp.sum(x**2 * weights[:, None]) / jnp.maximum(jnp.sum(weights), 1.0)
        return Weighted(mean * jnp.sum(weights), jnp.sum(weights))

    weights = np.array([2, 0, 1, 1, 0, 0], np.int32)
    return replace(case, loss_fn=loss_fn, batch=case.batch | {"weights": weights})


def constant_size() -> Case:
    """A sum over a constant, with decay and a mean beside it."""
    case = mlp(3)

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params[0]["w"]) @ params[1]["w"]
        return (
            jnp.sum((x - batch["y"]) ** 2) / 32 + 0.1 * jnp.sum(params[2]["w"] ** 2) - jnp.mean(x)
        )

    return replace(case, loss_fn=loss_fn)


def looked_up() -> Case:
    """The cross-entropy of tokens, of each a value that is looked up, after dropout, a loop and a
    rule.
    """
    case = mlp(3)

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        first, *_, last = (layer["w"] for layer in params)
        x = jax.nn.relu(batch["x"][:, None] * jnp.arange(1.0, 4.0)[None, :, None])

        def step(h: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            return jnp.where(
                jax.random.bernoulli(key, 0.5, h.shape), jnp.tanh(h @ first), 0.0
            ), None

        x = jax.lax.scan(step, x, jax.random.split(rng, 2))[0]
        logits = jax.nn.log_softmax(x @ last)
        return -jnp.mean(jnp.take_along_axis(logits, batch["tokens"][..., None], -1))

    tokens = np.arange(3 * MANY, dtype=np.int32).reshape(MANY, 3) % 2
    return replace(
        case, loss_fn=loss_fn, batch=case.batch | {"tokens": tokens}, rng=jax.random.key(3)
    )


def squeezed() -> Case:
    """A loss that does not take one example, which would have no axis left."""
    case = mlp(3)

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params[0]["w"]) @ params[1]["w"]
        return jnp.mean((x @ params[2]["w"])[:, :1].squeeze() * x.sum(1))

    return replace(case, loss_fn=loss_fn)


MADE = {name: CASES[name] for name in ("mlp", "threefry")}
MADE |= {"counted": counted, "weighed": weighed, "constant-size": constant_size}
MADE |= {"looked-up": looked_up, "squeezed": squeezed}


@pytest.mark.parametrize(
    ("name", "parts"),
    grid(
        [
            *((name, 2) for name in MADE),
            ("mlp", 4),
            ("weighed", 3),
            ("looked-up", 4),
            ("looked-up", 6),
            ("squeezed", 6),
        ],
        *((name, 2) for name in list(MADE)[::2]),
        ("weighed", 3),
    ),
)
def test_slices_make_the_whole(name: str, parts: int) -> None:
    case = MADE[name]()
    model = traced(case)
    whole = Sequential(model, optimize=False).run(case.params, batch_of(case), case.rng, case.state)
    slices = [e for e in divided(MANY, parts) if e]
    apart = taken_apart(model, [e.size for e in slices])
    loss, gradients = 0.0, [np.zeros_like(g) for g in whole.gradients]
    for e in slices:
        part = sliced(model, e, apart)
        batch = jax.tree.map(lambda x, e=e: x[e.start : e.stop], batch_of(case))
        out = Sequential(part, optimize=False).run(case.params, batch, case.rng, case.state)
        loss += float(out.loss) * (e.size / MANY if apart.batching.loss.over is Over.MEAN else 1.0)
        gradients = [a + np.asarray(b) for a, b in zip(gradients, out.gradients, strict=True)]
    np.testing.assert_allclose(loss, float(whole.loss), rtol=1e-5)
    for a, b in zip(gradients, whole.gradients, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-4, atol=1e-6)


def test_layers_alike_but_for_their_masks_share_programs() -> None:
    model = traced(mlp())
    apart = taken_apart(model, [2])
    first, second = (sliced(model, e, apart) for e in (Examples(0, 2), Examples(2, 4)))
    assert [
        a.structure == b.structure for a, b in zip(first.bodies, second.bodies, strict=True)
    ] == [True] * 5


def test_finds_how_edges_and_aux_lie() -> None:
    base = mlp()

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
        aux = jnp.sum(batch["y"]), jnp.mean(batch["x"], 0), batch["x"][:, 0]
        return base.loss_fn(params, batch, rng), aux

    found = taken_apart(traced(replace(base, loss_fn=loss_fn, has_aux=True)), [2]).batching
    assert [(spread.over, spread.axis) for spread in found.tensors] == [(Over.ALONG, 0)] * 4
    assert [spread.over for spread in found.aux] == [Over.SUM, Over.MEAN, Over.ALONG]


def refused(loss_fn: Any, match: str, sizes: Sequence[int] = (2,), **options: Any) -> None:
    case = mlp(2)
    loss = trace_loss(
        lambda *given: loss_fn(*given),
        case.params,
        batch_of(case),
        None,
        options.pop("state", None),
        **options,
    )
    with pytest.raises(CoupledError, match=match):
        taken_apart(build_graph(loss), sizes)


def test_a_loss_that_slices_do_not_make_is_refused_with_the_cure() -> None:
    def made(params: Any, batch: Any) -> jax.Array:
        return batch["x"] @ params[0]["w"] @ params[1]["w"]

    refused(
        lambda p, b, _: jnp.max(made(p, b)),
        "layer 1 computes, .* a mean or a sum over its examples",
    )
    refused(lambda p, b, _: jnp.sum(made(p, b)) / jnp.sum(b["y"]), "jvpipe.Weighted")
    refused(
        lambda p, b, _: Weighted(jnp.mean(made(p, b)), jnp.float32(1.0)),
        "a jvpipe.Weighted of two sums over examples",
    )
    refused(
        lambda p, b, _: (jnp.mean(made(p, b)), [jnp.max(b["y"])]), "leaf .0. of aux", has_aux=True
    )
    state = np.zeros((MANY, 2), np.float32)
    refused(
        lambda p, s, b, _: (jnp.mean(made(p, b)), s + b["y"][:, :2]),
        "does not take 2 examples|has a part for each",
        has_state=True,
        state=state,
    )


def test_a_loss_that_fixes_its_number_of_examples_is_refused() -> None:
    refused(
        lambda p, b, _: jnp.mean((b["x"] @ p[0]["w"] @ p[1]["w"]).reshape(MANY, -1)),
        "does not take 2 examples",
    )


def test_a_loss_that_is_another_on_one_of_the_slices_is_refused() -> None:
    def loss_fn(params: Any, batch: Any, _: Any) -> jax.Array:
        x = batch["x"] @ params[0]["w"] @ params[1]["w"]
        return jnp.mean(x**2) * (5.0 if x.shape[0] == 3 else 1.0)

    refused(loss_fn, "cannot be computed from .* slices", sizes=(2, 3))
