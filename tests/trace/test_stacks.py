"""Parameters stacked over layers are taken apart, so that a scan over layers is cut between its
iterations.
"""

from dataclasses import replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.leaves import abstract
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.stacks import Stacks, find_stacks
from jvpipe.trace.structure import structure
from tests.sequential import Sequential
from tests.zoo import (
    B,
    Case,
    D,
    in_bfloat16,
    mean_square,
    quick_key,
    recurrent,
    regression_batch,
    scanned,
)


def stacks_of(case: Case) -> Stacks:
    return find_stacks(trace_loss(case.loss_fn, case.params, case.batch, case.rng), case.params)


def taken_apart(case: Case) -> tuple[Stacks, Traced]:
    stacks = stacks_of(case)
    loss = trace_loss(
        stacks.of_slices(case.loss_fn), stacks.split(case.params), case.batch, case.rng
    )
    return stacks, build_graph(loss)


def assert_equals_plain_jax(case: Case, tolerance: float) -> Traced:
    stacks, traced = taken_apart(case)
    sliced = stacks.split(case.params)
    found = Sequential(traced, optimize=False).run(sliced, case.batch, case.rng)
    key = None if case.rng is None else jax.random.fold_in(jax.random.fold_in(case.rng, 0), 0)
    loss, gradients = jax.jit(jax.value_and_grad(case.loss_fn))(case.params, case.batch, key)
    np.testing.assert_allclose(found.loss, loss, rtol=tolerance)
    joined = stacks.join(jax.tree.unflatten(jax.tree.structure(sliced), found.gradients))
    for ours, theirs in zip(jax.tree.leaves(joined), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)
    return traced


def test_leaves_that_a_scan_over_layers_reads_are_found() -> None:
    for case in (scanned(3), in_bfloat16(scanned(3))):
        stacks = stacks_of(case)
        lengths = stacks.tree.unflatten(["-" if n is None else n for n in stacks.lengths])
        assert lengths == {
            "inputs": "-",
            "blocks": {"w": 3, "norm": {"scale": 3, "bias": 3}},
            "head": "-",
        }


def test_a_scan_over_layers_is_cut_between_its_iterations() -> None:
    graph = taken_apart(scanned(6))[1]
    assert len(graph.graph.layers) == 6 + 2
    assert {t.array.shape for t in graph.graph.tensors} == {
        (4, 6, 8),
        (),
    }  # the stream, and what the scan yields
    assert [p.array.name for p in graph.graph.parameters][6:8] == [
        "blocks/norm/scale/0",
        "blocks/norm/scale/1",
    ]
    kinds = [structure(b.eqns, b.inputs, b.outputs) for b in graph.bodies]
    assert len(set(kinds[1:-1])) == 1


def test_slices_equal_plain_jax() -> None:
    traced = assert_equals_plain_jax(scanned(), 1e-5)
    assert len(traced.graph.layers) == 5


def test_a_linen_scan_is_cut_too() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            y = nn.Dense(2 * D)(nn.LayerNorm()(x))
            return x + nn.Dropout(0.2, deterministic=False)(nn.Dense(D)(nn.gelu(y))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            options = {
                "variable_axes": {"params": 0},
                "split_rngs": {"params": True, "dropout": True},
                "length": 6,
            }
            x, _ = nn.scan(nn.remat(Block), **options)(name="blocks")(nn.Dense(D)(x), None)
            return nn.Dense(D)(x)

    batch = regression_batch(B, D)
    with jax.numpy_rank_promotion("allow"):
        params = Model().init(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch["x"]
        )["params"]

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        with jax.numpy_rank_promotion("allow"):
            return mean_square(
                cast(Any, Model().apply({"params": params}, batch["x"], rngs={"dropout": rng})),
                batch["y"],
            )

    traced = assert_equals_plain_jax(Case(loss_fn, params, batch, quick_key(2)), 1e-5)
    assert [layer.name for layer in traced.graph.layers][1:7] == ["blocks"] * 6
    assert len(traced.graph.layers) == 8


def test_scans_over_time_are_left_alone() -> None:
    assert not stacks_of(recurrent())

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:  # a bias for each moment of time
        def cell(h: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            x, bias = now
            h = jnp.tanh((x + bias[None]) @ params["w"] + h)
            return h, h

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((B, D)), (batch, params["bias"]))[1])

    params = {"w": np.eye(D, dtype=np.float32), "bias": np.zeros((5, D), np.float32)}
    assert not stacks_of(Case(loss_fn, params, np.ones((5, B, D), np.float32)))


@pytest.mark.parametrize("use", ["beside", "returned", "constant"])
def test_a_stack_that_is_read_otherwise_stays_whole(use: str) -> None:
    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        def body(x: jax.Array, ws: Any) -> tuple[jax.Array, None]:
            extra = params["a"][0] if use == "constant" else 0.0
            return jnp.tanh(x @ ws["a"] @ ws["b"]) + jnp.mean(extra), None

        x, _ = jax.lax.scan(body, batch["x"], params)
        beside = jnp.sum(params["a"]) if use == "beside" else 0.0
        return mean_square(x, batch["y"]) + beside, params["a"] if use == "returned" else None

    matrices = np.stack([np.eye(D, dtype=np.float32)] * 3)
    case = Case(loss_fn, {"a": matrices, "b": matrices}, regression_batch(B, D), has_aux=True)
    loss = trace_loss(loss_fn, case.params, case.batch, None, has_aux=True)
    assert find_stacks(loss, case.params).lengths == (None, 3)


def test_shapes_are_taken_apart_like_arrays() -> None:
    case = scanned(3)
    stacks = stacks_of(case)
    arrays, shapes = stacks.split(case.params), stacks.split(abstract(case.params))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), arrays) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    for before, after in zip(
        jax.tree.leaves(case.params), jax.tree.leaves(stacks.join(arrays)), strict=True
    ):
        np.testing.assert_array_equal(before, after)
    assert stacks == stacks_of(replace(case, params=abstract(case.params)))


def test_slices_of_which_an_optimizer_keeps_other_arrays_are_refused_with_the_cure() -> None:
    stacks = Stacks(jax.tree.structure({"blocks": 0}), (2,))
    parts = stacks.split({"blocks": np.ones((2, 3))})
    masked = optax.masked(
        optax.trace(0.9), lambda p: jax.tree.unflatten(jax.tree.structure(p), [True, False])
    )
    with pytest.raises(
        ValueError, match=r"the layers of a parameter that a scan stacks.*choose its masks"
    ):
        stacks.join(masked.init(parts))
