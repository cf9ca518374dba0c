"""What crosses between layers, who reads it, who owns what."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.values import ValueKind
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from tests.sequential import Sequential
from tests.zoo import (
    B,
    Case,
    D,
    dropped,
    in_bfloat16,
    integers,
    mean_square,
    mlp,
    quick_key,
    resnet,
    three_readers,
    transformer,
    unused,
)


def traced(case: Case) -> Traced:
    return build_graph(
        trace_loss(case.loss_fn, case.params, case.batch, case.rng, case.state, **case.options)
    )


def names_read(graph: LayerGraph, layer: int) -> list[str]:
    return [
        graph.parameters[p].array.name for p in graph.layers[layer].reading(ValueKind.PARAMETER)
    ]


def test_a_skip_goes_straight_to_each_reader() -> None:
    graph = traced(three_readers(6)).graph
    (skip,) = graph.skips()
    assert (skip.producer, skip.readers) == (0, (1, 2, 3, 5))
    for reader in skip.readers:
        assert 0 in graph.layers[reader].reading(ValueKind.TENSOR)


def test_a_tied_parameter_is_owned_by_its_first_reader() -> None:
    graph = traced(transformer(3)).graph
    (tied,) = graph.tied()
    assert (tied.array.name, tied.readers, tied.owner) == ("embedding", (0, 7), 0)


def test_cheap_values_without_parameters_are_made_again_where_they_are_needed() -> None:
    graph = traced(transformer(3)).graph
    assert {t.array.shape for t in graph.tensors} == {(4, 6, 8)}  # neither masks nor keys are sent
    lengths = next(i for i, a in enumerate(graph.batch) if a.name == "lengths")
    reading = [layer.id for layer in graph.layers if lengths in layer.reading(ValueKind.BATCH)]
    assert reading == [1, 3, 5, 7]  # three masks of attention, and the loss


def test_casting_all_parameters_at_the_top_ties_nothing() -> None:
    plain, low = traced(transformer(3)).graph, traced(in_bfloat16(transformer(3))).graph
    assert [p.readers for p in low.parameters] == [p.readers for p in plain.parameters]
    assert {t.array.dtype for t in low.tensors} == {"bfloat16"}
    assert {p.array.dtype for p in low.parameters} == {"float32"}


def test_integers_cross_without_cotangents() -> None:
    graph = traced(integers()).graph
    assert {(t.array.dtype, t.differentiable) for t in graph.tensors} == {
        ("float32", True),
        ("int32", False),
        ("bool", False),
    }


def test_what_only_aux_reads_has_no_cotangent() -> None:
    base = mlp(8)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        x, first = batch["x"], cast(Any, None)
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"][None])
            first = jnp.sin(x) if first is None else first
        return mean_square(x, batch["y"]), jnp.sum(first @ x.T)

    graph = traced(Case(loss_fn, base.params, base.batch, has_aux=True)).graph
    (skip,) = graph.skips()
    assert not skip.differentiable
    assert all(t.differentiable for t in graph.tensors if t is not skip)


def test_masks_of_dropout_can_be_kept_instead_of_random_bits() -> None:
    graph = traced(dropped("fold_in", quick_key(0), depth=7)).graph
    for layer in graph.layers:
        assert [(c.name, c.dtype) for c in layer.candidates] == [
            ("dot_general_0", "float32"),
            ("random_bits_1", "bool"),
        ]


def test_a_parameter_that_nothing_reads_has_an_owner() -> None:
    case = unused()
    graph = traced(case).graph
    readers = {p.array.name: p.readers for p in graph.parameters}
    assert readers["never"] == (graph.loss_layer,)
    assert readers["stopped"] == (0,)
    assert readers["watched"] == (graph.loss_layer,)
    gradients = (
        Sequential(traced(case), optimize=False).run(case.params, case.batch, None).gradients
    )
    for p, gradient in zip(graph.parameters, gradients, strict=True):
        assert np.any(gradient) == p.array.name.startswith("layers/"), p.array.name


def test_state_is_written_where_it_is_made() -> None:
    graph = traced(resnet(4)).graph
    for i, block in enumerate(graph.layers[1:5]):
        assert block.reading(ValueKind.STATE) == tuple(range(4 * i, 4 * i + 4))
        assert sorted(block.writing(ValueKind.STATE)) == list(range(4 * i, 4 * i + 4))


def test_state_that_nothing_reads_is_read_where_it_is_written_so_that_the_old_one_ends() -> None:
    base = mlp(4)

    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        return base.loss_fn(params, batch, rng), {
            "first": jnp.sum(batch["x"] @ params[0]["w"]),
            "last": state["last"],
        }

    state = {"first": np.float32(0), "last": np.float32(0)}
    graph = traced(Case(loss_fn, base.params, base.batch, state=state, has_state=True)).graph
    (writer,) = (layer for layer in graph.layers if layer.writing(ValueKind.STATE))
    assert [layer.id for layer in graph.layers if layer.reading(ValueKind.STATE)] == [writer.id]
    assert writer.reading(ValueKind.STATE) == writer.writing(ValueKind.STATE) == (0,)


def test_state_may_hold_keys_and_counts() -> None:
    base = mlp(7)
    state = {"key": jax.random.key(1), "count": np.int32(3), "still": np.ones(2, np.float32)}

    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        x = batch["x"]
        keys = jax.random.split(jax.random.fold_in(state["key"], state["count"]), len(params) + 1)
        for key, p in zip(keys[1:], params, strict=True):
            x = jnp.tanh(x @ p["w"]) * jax.random.uniform(key, x.shape)
        return mean_square(x, batch["y"]), state | {"key": keys[0], "count": state["count"] + 1}

    case = Case(loss_fn, base.params, base.batch, state=state, has_state=True)
    graph = traced(case)
    assert len(graph.graph.layers) == 7
    found = Sequential(graph, optimize=False).run(case.params, case.batch, None, state)
    loss, new = jax.jit(loss_fn)(base.params, state, base.batch, None)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
    count, key, still = found.state
    assert (int(count), int(np.sum(still))) == (4, 2)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(new["key"]))


def test_flops_count_the_products_of_a_forward() -> None:
    assert [layer.flops for layer in traced(mlp(6)).graph.layers] == [2 * B * D * D] * 6


def test_cuts_can_be_given() -> None:
    first = traced(mlp(7))
    again = build_graph(first.loss, first.cuts[2:4])
    assert len(again.graph.layers) == 3
    assert [p.readers for p in again.graph.parameters] == [(0,)] * 6 + [(1,)] * 2 + [(2,)] * 6
    assert names_read(again.graph, 1) == ["3/b", "3/w"]


def test_deep_models_are_cut_between_all_their_blocks() -> None:
    assert len(traced(transformer(16)).graph.layers) == 2 * 16 + 2
