"""Shards of an optimizer: packed by bytes, and whole layers where their leaves cannot be updated apart."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvpipe.ir.layers import Array, Layer, LayerGraph, Parameter, Ref
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import ValueKind
from jvpipe.programs.optimizer import OptimizerCut, cut_optimizer
from jvpipe.programs.shards import leaf_sizes, sharded

SIZES = [300, 300, 500, 300, 500]
OWNERS = [0, 0, 0, 1, 1]
PLAN = Plan.from_cuts([2], devices=[(0, 1)])
LAYERS = tuple(
    Layer(i, "layer", tuple(Ref(ValueKind.PARAMETER, p) for p, owner in enumerate(OWNERS) if owner == i), ())
    for i in range(2)
)
GRAPH = LayerGraph(
    LAYERS,
    (),
    tuple(Parameter(Array("p", (n,), "float32", 4 * n), (i,)) for n, i in zip(SIZES, OWNERS, strict=True)),
)


def cut(optimizer: optax.GradientTransformation) -> OptimizerCut:
    shapes = [jax.ShapeDtypeStruct((n,), np.float32) for n in SIZES]
    return cut_optimizer(optimizer, shapes, OWNERS, [1] * len(SIZES), microbatches=1)


def test_leaves_are_packed_by_the_bytes_of_their_state() -> None:
    whole = cut(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    assert leaf_sizes(whole, GRAPH) == [(8 * n, 4 * n) for n in SIZES]
    apart = sharded(whole, GRAPH, PLAN)
    loads = [sum(n for n, shard in zip(SIZES, apart.shards, strict=True) if shard == q) for q in range(2)]
    assert loads == [1100, 800]
    last = [(piece.layer, piece.shard) for piece in apart.update if piece.phase == 1]
    assert last == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sharded(apart, GRAPH, Plan.from_cuts([2])) is whole
    assert sharded(apart, GRAPH, replace(PLAN)) is apart, "it is cut once"


def test_leaves_of_a_layer_that_an_optimizer_mixes_stay_together() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        first, second, *others = updates
        return [first + jnp.flip(second), second, *others], state

    mixing = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    assert sharded(cut(mixing), GRAPH, PLAN).shards == (0, 0, 0, 1, 1)
