"""The layers of a graph, run one by one, against plain JAX; and the same bits whatever their
forwards keep.
"""

import random
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe._jax import aval, jaxpr_as_fun
from jvpipe.ir.layers import Layer, Ref
from jvpipe.ir.values import ValueKind
from jvpipe.ir.weighted import Weighted
from jvpipe.programs.layer import differentiate, inference
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.model import trace_model
from tests.grid import grid
from tests.sequential import Outcome, Sequential
from tests.zoo import (
    CASES,
    B,
    Case,
    D,
    cond,
    custom_rules,
    dropped,
    in_bfloat16,
    mlp,
    quick_key,
    recurrent,
    resnet,
    transformer,
)

Kept = Callable[[Layer], Collection[str]]


def traced(case: Case) -> Traced:
    return build_graph(
        trace_loss(case.loss_fn, case.params, case.batch, case.rng, case.state, **case.options)
    )


def outcome(case: Case, kept: Kept, *, optimize: bool) -> Outcome:
    return Sequential(traced(case), kept, optimize=optimize).run(
        case.params, case.batch, case.rng, case.state
    )


def everything(layer: Layer) -> list[str]:
    return [candidate.name for candidate in layer.candidates]


def nothing(layer: Layer) -> list[str]:
    return []


def some(seed: int) -> Kept:
    """Half of the candidates, at random."""
    flip = random.Random(seed)
    return lambda layer: [candidate.name for candidate in layer.candidates if flip.random() < 0.5]


def plain(case: Case) -> tuple[Any, Any, Any, Any]:
    """Loss, gradients, new state and aux without jvpipe; the gradients of a weighted loss are those
    of its total.
    """
    key = None if case.rng is None else jax.random.fold_in(jax.random.fold_in(case.rng, 0), 0)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def value_and_grad(params: Any, batch: Any, state: Any) -> Any:
        def total(params: Any) -> tuple[jax.Array, Any]:
            out = case.loss_fn(params, *([state] if case.has_state else []), batch, key)
            loss, *beside = out if case.has_aux or case.has_state else [out]
            new_state = beside.pop(0) if case.has_state else None
            return loss.total if isinstance(loss, Weighted) else loss, (loss, new_state, beside)

        return jax.value_and_grad(total, has_aux=True)(params)

    (_, (loss, new_state, aux)), gradients = value_and_grad(case.params, case.batch, case.state)
    return loss, gradients, new_state, aux


def assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    """Leaf by leaf, relative to the norm of all."""
    ours, theirs = (
        [np.asarray(x, np.result_type(x.dtype, np.float32)) for x in jax.tree.leaves(tree)]
        for tree in (ours, theirs)
    )
    norm = np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in theirs))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * norm, rtol=0)


def assert_same_bits(ours: Outcome, theirs: Outcome) -> None:
    for a, b in zip(jax.tree.leaves(vars(ours)), jax.tree.leaves(vars(theirs)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


APART = (
    "mlp",
    "resnet",
    "three-readers",
    "cond",
    "loops",
    "custom-rules",
    "spectral",
    "with-aux",
    "unused",
    "chained-keys",
)
"""Each with something that the others lack; whole models are compared in
tests/end_to_end/test_exactness.py.
"""


@pytest.mark.parametrize("name", grid(APART, "three-readers", "cond", "custom-rules", "unused"))
def test_equals_plain_jax(name: str) -> None:
    case = CASES[name]()
    found = outcome(case, some(seed=1), optimize=False)
    loss, gradients, state, aux = plain(case)
    assert_close(
        [found.loss, found.weight], list(loss) if isinstance(loss, Weighted) else [loss, None], 1e-6
    )
    assert_close(found.gradients, gradients, 1e-6)
    assert_close(found.state, state, 1e-6)
    assert_close(found.aux, aux, 1e-6)


def with_dropout() -> Case:
    """Dropout, whose masks are candidates."""
    return dropped("fold_in", quick_key(0), depth=3)


def transformer_block() -> Case:
    return transformer(1, keys=None)


FATES = [resnet, custom_rules]
FATES_LOW = [transformer_block, with_dropout, recurrent, cond]


@pytest.mark.parametrize("make", grid(FATES, custom_rules))
def test_same_bits_whatever_is_kept(make: Callable[[], Case]) -> None:
    assert_same_bits(
        outcome(make(), everything, optimize=True), outcome(make(), nothing, optimize=True)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("make", FATES_LOW)
def test_same_bits_whatever_is_kept_in_bfloat16(make: Callable[[], Case]) -> None:
    case = in_bfloat16(make())
    found = outcome(case, everything, optimize=True)
    assert_same_bits(found, outcome(case, some(seed=3), optimize=True))
    loss, gradients, *_ = plain(case)
    assert all(g.dtype == jnp.float32 for g in found.gradients)
    assert_close(found.loss, loss, 1e-2)
    assert_close(found.gradients, gradients, 3e-2)


@pytest.mark.parametrize(
    "name",
    grid(
        ["contrastive", "mixer", "stacked-decoder", "normalized-products", "noisy"],
        "mixer",
        "normalized-products",
    ),
)
def test_same_bits_of_what_is_normalized_whatever_is_kept(name: str) -> None:
    case = CASES[name]()
    model = trace_model(case.loss_fn, case.params, case.batch, case.rng)
    params = model.stacks.split(case.params)
    kept, made_again = (
        Sequential(model.traced, choice).run(params, case.batch, case.rng)
        for choice in (everything, nothing)
    )
    assert_same_bits(kept, made_again)


def test_what_is_kept_is_what_is_left_over() -> None:
    graph = traced(with_dropout())
    layer, body = graph.graph.layers[1], graph.bodies[1]
    product, mask = layer.candidates
    assert (product.name, mask.dtype) == ("dot_general_0", "bool")

    def left(*kept: str) -> list[tuple[tuple[int, ...], str]]:
        return [(a.shape, a.dtype) for a in differentiate(body, kept, ()).signature.residuals]

    assert left() == []
    assert left(product.name) == [((B, D), "float32")]
    assert left(mask.name) == [((B, D), "bool")]
    assert sorted(left(product.name, mask.name)) == [((B, D), "bool"), ((B, D), "float32")]


def test_inputs_and_outputs_are_not_kept_twice() -> None:
    graph = traced(mlp(3))
    made = differentiate(graph.bodies[1], everything(graph.graph.layers[1]), ())
    kinds = [kind for kind, _ in made.signature.sources]
    assert len(made.forward.jaxpr.outvars) == 1 + len(made.signature.residuals)
    assert kinds.count("residual") == 1  # the product, behind its barrier
    assert set(kinds) == {"input", "residual"}


def test_a_cotangent_is_added_to_the_sum_that_comes_in() -> None:
    graph = traced(mlp(3))
    layer, body = graph.graph.layers[1], graph.bodies[1]
    (tensor,) = layer.reading(ValueKind.TENSOR)
    alone = differentiate(body, [], [])
    after = differentiate(body, [], [tensor])
    assert alone.key != after.key
    position = layer.reads.index(Ref(ValueKind.TENSOR, tensor))
    assert (alone.signature.partial, after.signature.partial) == ((), (position,))

    def run(made: Any, *sums: Any) -> list[jax.Array]:
        rng = np.random.default_rng(0)
        inputs = [rng.normal(size=aval(v).shape).astype(np.float32) for v in body.inputs]
        outputs = jaxpr_as_fun(made.forward)(*inputs)
        source = {"input": inputs, "output": outputs, "residual": outputs[len(body.outputs) :]}
        values = [source[kind][i] for kind, i in made.signature.sources]
        cotangents = [np.ones_like(outputs[i]) for i in made.signature.cotangents]
        zeros = [np.zeros_like(inputs[i]) for i in made.signature.gradients]
        return list(jaxpr_as_fun(made.backward)(*values, *cotangents, *sums, *zeros))

    *_, without = run(alone)
    before = np.full(without.shape, 7.0, np.float32)
    *_, added = run(after, before)
    np.testing.assert_allclose(added, before + without, rtol=1e-6)


def test_inference_is_the_forward_without_residuals() -> None:
    graph = traced(mlp(3))
    closed = inference(graph.bodies[0])
    assert len(closed.jaxpr.outvars) == len(graph.graph.layers[0].writes)
    p, x = mlp(3).params[0], mlp(3).batch["x"]
    values = {"parameter": {0: p["b"], 1: p["w"]}, "batch": {0: x}}
    inputs = [values[ref.kind][ref.index] for ref in graph.graph.layers[0].reads]
    (found,) = jaxpr_as_fun(closed)(*inputs)
    np.testing.assert_allclose(found, np.tanh(x @ p["w"] + p["b"]), rtol=1e-5, atol=1e-6)
