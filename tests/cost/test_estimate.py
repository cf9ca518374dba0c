"""Estimates: quick at real size, without allocating, and proportional to the hardware."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs
from jvpipe.cost.estimate import estimate
from jvpipe.cost.hardware import Cluster
from jvpipe.models.workload import load
from jvpipe.programs.store import ProgramStore
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from tests.cost.traces import optimizer, traced

A100 = find_cluster("a100-40gb")


@pytest.fixture(scope="module")
def bert() -> Traced:
    work = load("bert", "48")
    params = jax.eval_shape(work.init, jax.random.key(0))
    return build_graph(trace_loss(work.loss_fn, params, work.abstract_batch(8), jax.random.key(0)))


@pytest.fixture(scope="module")
def bert_costs(bert: Traced) -> Costs:
    return estimate(bert, A100, store=ProgramStore())


def test_nothing_is_allocated(bert: Traced) -> None:
    before = len(jax.live_arrays())
    estimate(bert, A100, store=ProgramStore())
    assert len(jax.live_arrays()) == before


def test_blocks_alike_cost_the_same(bert_costs: Costs) -> None:
    layers = bert_costs.layers
    attention, feed_forward = layers[1:-4:2], layers[2:-4:2]
    for alike in (attention, feed_forward):
        assert (
            len(
                {
                    (layer.forward_s, layer.backward_s, layer.temporary_bytes, len(layer.options))
                    for layer in alike
                }
            )
            == 1
        )
    assert len({name for layer in layers for name in layer.options[-1].fates}) > 3 * len(attention)


def test_a_block_takes_what_its_products_take_and_its_backward_twice_that(
    bert: Traced, bert_costs: Costs
) -> None:
    for layer, cost in list(zip(bert.graph.layers, bert_costs.layers, strict=True))[2:40]:
        products_s = layer.flops / A100.device.products_per_s("float32")
        assert products_s < cost.forward_s < 3 * products_s
        assert 1.5 * cost.forward_s < cost.backward_s < 3.5 * cost.forward_s
        # what is computed again takes no longer than computing everything
        assert 0 < cost.options[-1].extra_s < cost.forward_s
        assert 4 <= len(cost.options) <= 24


def test_hardware_twice_as_fast_takes_half_as_long() -> None:
    def scaled(by: float) -> Cluster:
        device = A100.device
        return replace(
            A100,
            device=replace(
                device,
                memory_bytes_per_s=by * device.memory_bytes_per_s,
                flops_per_s={dtype: by * rate for dtype, rate in device.flops_per_s.items()},
                launch_s=device.launch_s / by,
                elementwise_per_s=by * device.elementwise_per_s,
            ),
        )

    once, twice = (
        estimate(traced("pre-norm"), scaled(by), optimizer("pre-norm")) for by in (1.0, 2.0)
    )
    for a, b in zip(once.layers, twice.layers, strict=True):
        assert a.forward_s == pytest.approx(2 * b.forward_s)
        assert a.backward_s == pytest.approx(2 * b.backward_s)
        assert [o.extra_s for o in a.options] == pytest.approx([2 * o.extra_s for o in b.options])
        assert a.optimizer_bytes == b.optimizer_bytes >= 2 * a.parameter_bytes


def test_without_fates_everything_is_kept() -> None:
    bare, full = (estimate(traced("pre-norm"), A100, fates=fates) for fates in (False, True))
    for a, b in zip(bare.layers, full.layers, strict=True):
        assert len(a.options) == 1
        assert a.options[0] == b.options[0]
    assert replace(full, layers=()) == replace(bare, layers=())


def test_halves_of_backwards_are_looked_at_if_somebody_asks() -> None:
    """In the model every layer but the first gives a cotangent; products run in one of the
    halves.
    """
    whole, halved = (
        estimate(traced("pre-norm"), A100, fates=False, split=split) for split in (False, True)
    )
    assert {layer.split for layer in whole.layers} == {None}
    first, *others = halved.layers
    assert first.split is None
    for layer in others:
        assert layer.split is not None
        assert min(layer.split.input_s, layer.split.weight_s) > 0
        assert (
            layer.backward_s * 0.9
            < layer.split.input_s + layer.split.weight_s
            < layer.backward_s * 1.8
        )
    assert [replace(layer, split=None) for layer in halved.layers] == list(whole.layers)


def test_an_update_takes_what_it_reads_and_writes() -> None:
    """Adam reads parameters, gradients and two moments, and writes all but the gradients; the norm
    reads gradients.
    """
    model, cut = traced("mlp"), optimizer("mlp")
    slow = replace(A100.device, memory_bytes_per_s=1e6, launch_s=0.0)
    layers = estimate(model, replace(A100, device=slow), cut, store=ProgramStore()).layers
    without = estimate(model, replace(A100, device=slow), store=ProgramStore()).layers
    assert not any(layer.update_s for layer in without)
    for layer in layers[:-1]:  # the last one has the global program
        moved = 7 * layer.parameter_bytes + layer.gradient_bytes
        assert layer.update_s * 1e6 == pytest.approx(moved, rel=0.25, abs=64)


def test_arrays_of_a_tpu_fill_tiles() -> None:
    """Weights of 100 x 100 are laid as 104 x 128."""

    def loss_fn(params: list[jax.Array], x: jax.Array, rng: None) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = [jax.ShapeDtypeStruct((100, 100), jnp.float32)] * 2
    x = jax.ShapeDtypeStruct((32, 100), jnp.float32)
    model = build_graph(trace_loss(loss_fn, weights, x, None))
    gpu, tpu = (estimate(model, find_cluster(name), fates=False) for name in ("h100", "v5e"))
    for each, filled in zip(gpu.layers, tpu.layers, strict=True):
        assert (each.parameter_bytes, filled.parameter_bytes) == (40_000, 104 * 128 * 4)
    assert (gpu.layers[1].input_bytes, tpu.layers[1].input_bytes) == (32 * 400, 32 * 512)
