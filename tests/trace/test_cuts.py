"""Models are cut where they are narrow, and blocks alike become layers alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.values import ValueKind
from jvpipe.trace.cuts import narrow_cuts
from jvpipe.trace.flatten import flatten
from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.structure import structure
from tests.zoo import (
    Case,
    dropped,
    flax_nnx,
    linen,
    mlp,
    quick_key,
    resnet,
    three_readers,
    transformer,
    unet,
)


def traced(case: Case) -> Traced:
    return build_graph(
        trace_loss(case.loss_fn, case.params, case.batch, case.rng, case.state, **case.options)
    )


def names(graph: LayerGraph) -> list[str]:
    return [layer.name for layer in graph.layers]


def crossing(graph: LayerGraph) -> list[list[tuple[int, ...]]]:
    """The shapes of what each layer sends on."""
    return [
        [graph.tensors[t].array.shape for t in layer.writing(ValueKind.TENSOR)]
        for layer in graph.layers
    ]


def kinds(case: Case) -> str:
    """A letter per layer; layers of one letter can share their programs."""
    found: dict[Any, str] = {}
    return "".join(
        found.setdefault(structure(b.eqns, b.inputs, b.outputs), chr(ord("a") + len(found)))
        for b in traced(case).bodies
    )


def test_an_mlp_is_cut_after_each_activation() -> None:
    graph = traced(mlp(8)).graph
    assert names(graph) == [str(i) for i in range(8)]
    assert crossing(graph) == [[(4, 8)]] * 7 + [[]]
    for i, layer in enumerate(graph.layers):
        assert [graph.parameters[p].array.name for p in layer.reading(ValueKind.PARAMETER)] == [
            f"{i}/b",
            f"{i}/w",
        ]


@pytest.mark.parametrize("pre_norm", [True, False])
def test_a_transformer_is_cut_at_its_residual_stream(pre_norm: bool) -> None:
    graph = traced(transformer(4, pre_norm=pre_norm)).graph
    assert len(graph.layers) == 2 * 4 + 2
    assert crossing(graph) == [[(4, 6, 8)]] * 9 + [[]]
    assert [name.split("/")[:2] for name in names(graph)[1:-1]] == [
        ["blocks", str(i // 2)] for i in range(8)
    ]
    attention, feed_forward = (
        {graph.parameters[p].array.name for p in layer.reading(ValueKind.PARAMETER)}
        for layer in graph.layers[1:3]
    )
    assert attention == {f"blocks/0/attention/{n}" for n in "qkvo"} | {
        "blocks/0/attention_norm/scale",
        "blocks/0/attention_norm/bias",
    }
    assert {name.split("/")[2] for name in feed_forward} == {"mlp", "mlp_norm"}


def test_a_resnet_is_cut_between_its_blocks() -> None:
    graph = traced(resnet(6)).graph
    assert names(graph) == ["stem", *(f"blocks/{i}" for i in range(6)), "head"]
    assert [len(shapes) for shapes in crossing(graph)] == [1] * 7 + [0]


def test_the_levels_of_a_unet_are_cut_apart() -> None:
    graph = traced(unet(5)).graph
    assert names(graph) == [
        "down/0",
        "down/1",
        "down/2",
        "down/3",
        "down/4",
        "up/1",
        "up/2",
        "up/3",
        "up/4",
    ]
    assert [(t.producer, t.readers) for t in graph.skips()] == [
        (0, (1, 8)),
        (1, (2, 7)),
        (2, (3, 6)),
    ]


def test_flax_modules_name_the_layers() -> None:
    assert names(traced(linen(6)).graph) == [
        "LinenModel/Dense_0",
        *(f"LinenBlock_{i}" for i in range(6)),
        "Dense_1",
    ]
    assert names(traced(flax_nnx(6)).graph) == [
        "inputs",
        *(f"blocks/{i}" for i in range(6)),
        "output",
    ]


def test_a_small_model_is_looked_at_more_closely() -> None:
    assert len(traced(unet(2)).graph.layers) == 5
    assert len(traced(three_readers(5)).graph.layers) == 5


def test_work_behind_the_loss_moves_no_cut() -> None:
    base = transformer(4)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        return base.loss_fn(params, batch, rng), jnp.sum(params["embedding"][batch["targets"]])

    graph = traced(Case(loss_fn, base.params, base.batch, base.rng, has_aux=True)).graph
    assert names(graph)[:-2] == names(traced(base).graph)[:-1]


def test_without_work_there_is_nothing_to_cut() -> None:
    eqns = flatten(lambda x: jnp.sin(jnp.cos(x)), 1.0).jaxpr.eqns
    assert narrow_cuts(eqns, [False, False]) == []


def test_blocks_alike_are_layers_alike() -> None:
    assert kinds(transformer(4)) == "abcbcbcbde"
    assert kinds(transformer(4, pre_norm=False)) == "abcbcbcbde"
    assert kinds(resnet(5, halve_every=9)) == "abbbbcd"
    assert kinds(linen(6)) == "abbbbbbc"
    assert kinds(flax_nnx(6)) == "abbbbbbc"
    assert kinds(mlp(7, jax.nn.relu)) == "aaaaaab"


@pytest.mark.parametrize("how", ["fold_in", "split"])
@pytest.mark.parametrize(
    "rng", [jax.random.key(0), jax.random.PRNGKey(0), quick_key(0)], ids=["new", "old", "rbg"]
)
def test_keys_make_no_difference(how: str, rng: jax.Array) -> None:
    assert kinds(dropped(how, rng, depth=7)) == "aaaaaab"


@pytest.mark.parametrize("rng", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["new", "old"])
def test_keys_at_the_end_of_a_chain_are_sent(rng: jax.Array) -> None:
    case = dropped("chain", rng, depth=12)
    assert kinds(case) == "abcdeeeeeeef"
    skips = list(traced(case).graph.skips())
    assert [(t.producer, t.readers) for t in skips] == [(0, (i,)) for i in range(4, 12)]
    assert not any(t.differentiable for t in skips)


def test_a_change_far_away_leaves_a_layer_as_it_was() -> None:
    def structures(case: Case) -> list[Any]:
        return [structure(b.eqns, b.inputs, b.outputs) for b in traced(case).bodies]

    wide = mlp(12)
    wide.params[6]["w"] = np.zeros((8, 20), np.float32)
    wide.params[6]["b"] = np.zeros(20, np.float32)
    wide.params[7]["w"] = np.zeros((20, 8), np.float32)
    before, after = structures(mlp(12)), structures(wide)
    assert [i for i in range(12) if before[i] != after[i]] == [6, 7]
    longer = structures(mlp(14))
    assert longer[:11] == before[:11]
    assert longer[-1] == before[-1]
