"""Backwards in halves: the bits of the whole, no product twice, and which backwards are no halves
at all.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe._jax import ClosedJaxpr
from jvpipe.ir.layers import Ref, Source
from jvpipe.ir.values import ValueKind
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import (
    Share,
    backward_program,
    forward_program,
    input_program,
    layer_programs,
    weight_program,
)
from jvpipe.programs.store import Program, ProgramStore, shared_store
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import key_words, trace_loss
from jvpipe.trace.model import trace_model
from jvpipe.trace.primitives import flops
from tests.grid import grid
from tests.zoo import CASES, B, Case, D, in_bfloat16, mean_square, mlp, resnet, transformer

Arrays = list[np.ndarray]


def run(program: Program, arrays: Arrays) -> Arrays:
    """The results of a program, without its mark; its inputs are copied, for it may overwrite
    them.
    """
    (executable,) = shared_store().compile([(program, jax.devices()[0])])
    return [np.asarray(x) for x in executable(*map(np.array, arrays))[:-1]]


def drawn(rng: np.random.Generator, like: Any) -> np.ndarray:
    return rng.uniform(-1, 1, like.shape).astype(like.dtype)


def left_by_forwards(
    case: Case, traced: Traced, params: Any, programs: tuple[LayerPrograms, ...]
) -> Iterator[dict[Source, np.ndarray]]:
    """What each layer's backward may read, from a forward through all of them."""
    values: dict[Ref, Any] = {
        Ref(ValueKind.CONSTANT, i): c for i, c in enumerate(traced.loss.constants)
    }
    trees = {ValueKind.PARAMETER: params, ValueKind.BATCH: case.batch, ValueKind.STATE: case.state}
    for kind, tree in trees.items():
        values |= {Ref(kind, i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    if case.rng is not None:
        values[Ref(ValueKind.SEED, 0)] = np.array([*key_words(case.rng).ravel(), 0, 0], np.uint32)
    for layer, made in zip(traced.graph.layers, programs, strict=True):
        inputs, count = [values[ref] for ref in layer.reads], len(layer.writes)
        results = run(forward_program(made), inputs)
        values |= zip(layer.writes, results[:count], strict=True)
        left: dict[Source, np.ndarray] = {("input", i): x for i, x in enumerate(inputs)}
        left |= {("output", i): x for i, x in enumerate(results[:count])}
        left |= {("residual", i): x for i, x in enumerate(results[count:])}
        yield left


def both_ways(made: LayerPrograms, left: dict[Source, np.ndarray]) -> tuple[Arrays, Arrays]:
    """The results of the whole backward, and of its halves."""
    assert made.halves is not None
    rng, signature, split = np.random.default_rng(0), made.signature, made.halves.signature
    cotangents = {i: drawn(rng, left["output", i]) for i in signature.cotangents}
    sums = [drawn(rng, left["input", i]) for i in signature.partial]
    accumulators = [drawn(rng, left["input", i]) for i in signature.gradients]

    def read(of: Any) -> Arrays:
        return [*(left[source] for source in of.sources), *(cotangents[i] for i in of.cotangents)]

    whole = run(backward_program(made), [*read(signature), *sums, *accumulators])
    first = run(input_program(made), [*read(split.input), *sums])
    count = len(signature.returned)
    returned, handed = first[:count], first[count:]
    assert [(x.shape, str(x.dtype), x.nbytes) for x in handed] == [
        (a.shape, a.dtype, a.bytes) for a in split.handed
    ]
    gradients = run(weight_program(made), [*read(split.weight), *handed, *accumulators])
    return whole, [*gradients, *returned]


def products(closed: ClosedJaxpr) -> int:
    return sum(map(flops, closed.jaxpr.eqns))


def check(case: Case, share: Share) -> int:
    """Compares all layers of a model; how many backwards were split."""
    model = trace_model(
        case.loss_fn,
        case.params,
        case.batch,
        case.rng,
        case.state,
        has_aux=case.has_aux,
        has_state=case.has_state,
    )
    programs = layer_programs(shared_store(), model.traced, share)
    split = 0
    for made, left in zip(
        programs,
        left_by_forwards(case, model.traced, model.stacks.split(case.params), programs),
        strict=True,
    ):
        if made.halves is not None:
            split += 1
            for x, y in zip(*both_ways(made, left), strict=True):
                assert np.isfinite(x.astype(np.complex128)).all()
                np.testing.assert_array_equal(x, y)
            assert products(made.halves.input) + products(made.halves.weight) == products(
                made.backward
            )
    return split


FULL: dict[str, tuple[Share, int]] = {
    "pre-norm": ("all", 5),  # embedding, softmax with a mask, dropout, tied weights
    "mixer": (
        "nothing",
        3,
    ),  # what is normalized and divided: the two programs divide differently without calls
    "normalized-products": ("half", 1),
    "recurrent": ("half", 2),
    "custom-rules": ("nothing", 4),
    "nested": ("all", 3),
    "cond": ("nothing", 3),
    "experts": ("half", 5),
    "unet": ("all", 6),
    "scanned": ("nothing", 4),
    "spectral": ("half", 3),
    "linen": ("all", 5),
}


@pytest.mark.parametrize("name", grid(FULL, "pre-norm", "mixer", "custom-rules"))
def test_halves_have_the_bits_of_the_whole(name: str) -> None:
    share, split = FULL[name]
    assert check(CASES[name](), share) == split


def test_halves_have_the_bits_of_the_whole_with_convolutions() -> None:
    assert check(resnet(1), "half") > 1


LOW: list[tuple[Callable[[], Case], Share]] = [
    (partial(transformer, 1, keys=None), "half"),
    (CASES["mixer"], "all"),
    (CASES["recurrent"], "nothing"),
    (CASES["custom-rules"], "all"),
]


@pytest.mark.parametrize(("make", "share"), grid(LOW, LOW[3]))
def test_halves_have_the_bits_of_the_whole_in_bfloat16(
    make: Callable[[], Case], share: Share
) -> None:
    assert check(in_bfloat16(make()), share) > 0


def programs_of(
    loss_fn: Callable[..., jax.Array], params: Any, *, cuts: list[int] | None = None
) -> list[LayerPrograms]:
    x = np.ones((B, D), np.float32)
    return list(
        layer_programs(ProgramStore(), build_graph(trace_loss(loss_fn, params, x, None), cuts=cuts))
    )


def test_a_backward_of_one_kind_does_not_split() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.sort(jnp.tanh(x @ params[0]), -1)) @ params[1])

    weights = [np.eye(D, dtype=np.float32)] * 2
    first, *_ = programs_of(loss_fn, weights)
    assert not first.signature.returned
    assert first.halves is None, "nobody waits for a cotangent"
    found = [
        made
        for made in programs_of(loss_fn, weights, cuts=[1, 2, 4])
        if not made.signature.gradients
    ]
    assert found
    assert all(made.halves is None for made in found), "nobody waits for a gradient"


def test_a_product_is_handed_on_and_what_is_cheap_is_computed_twice() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) @ params[2]))

    weights = [np.eye(D, dtype=np.float32)] * 3
    _, layer = programs_of(loss_fn, weights, cuts=[2])
    halves = layer.halves
    assert halves is not None
    (handed,) = halves.signature.handed
    assert (handed.shape, handed.dtype, handed.bytes) == ((B, D), "float32", 4 * B * D)
    whole = layer.signature
    assert halves.signature.input.returned == whole.returned
    assert halves.signature.input.gradients == halves.signature.weight.returned == ()
    assert halves.signature.weight.gradients == whole.gradients
    assert halves.signature.weight.partial == ()
    assert {*halves.signature.input.sources, *halves.signature.weight.sources} == {*whole.sources}
    assert products(halves.input) == products(halves.weight) == products(layer.backward) // 2


def test_the_gradients_of_a_scan_are_handed_on() -> None:
    def loss_fn(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        def cell(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ params[1]), None

        return jnp.mean(jax.lax.scan(cell, jnp.tanh(x @ params[0]), None, length=3)[0])

    _, layer = programs_of(loss_fn, [np.eye(D, dtype=np.float32)] * 2)
    assert layer.halves is not None
    assert [a.shape for a in layer.halves.signature.handed] == [(D, D)]
    assert [eqn.primitive.name for eqn in layer.halves.weight.jaxpr.eqns][-1:] == ["add"]
    assert products(layer.halves.weight) == 0
    assert layer.halves.signature.weight.sources == ()


def test_halves_overwrite_the_sums_that_they_add_to() -> None:
    base = mlp(3)

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        first = jnp.tanh(batch["x"] @ params[0]["w"])
        x = jnp.tanh(first @ params[1]["w"])
        return mean_square(jnp.tanh(x @ params[2]["w"]) + first, batch["y"])

    traced = build_graph(trace_loss(loss_fn, base.params, base.batch, None))
    made = layer_programs(shared_store(), traced)[1]
    assert made.halves is not None
    assert made.signature.partial
    first, second = input_program(made), weight_program(made)
    assert [made.halves.input.in_avals[i].shape for i in first.donated] == [(B, D)]
    assert second.donated == (len(second.inputs) - 1,)
    assert len({first.key, second.key, backward_program(made).key}) == 3
