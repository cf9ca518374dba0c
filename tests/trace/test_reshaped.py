"""At other shapes a loss keeps its layers, though it has fewer equations there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.trace.graph import Traced, build_graph
from jvpipe.trace.loss import trace_loss
from jvpipe.trace.primitives import flops
from jvpipe.trace.reshaped import OtherLayersError, reshaped
from jvpipe.trace.sorted_equations import Sorted

PARAMS = [np.full((3, 3), i / 9, np.float32) for i in range(1, 7)]


def loss_fn(params: Any, x: Any, rng: Any) -> jax.Array:
    """Two products in each layer; what all examples have in common is spread over them, where there
    are several.
    """
    for up, down in zip(params[::2], params[1::2], strict=True):
        x = x + jnp.tanh((x + jnp.broadcast_to(x.mean(0, keepdims=True), x.shape)) @ up) @ down
    return jnp.mean(x**2)


def traced(loss: Any, examples: int) -> Traced:
    return build_graph(trace_loss(loss, PARAMS, np.ones((examples, 3), np.float32), None))


def split_before_a_product(model: Traced) -> Traced:
    """The last layer that has something before a product is split there."""
    products = [
        at
        for at, eqn in enumerate(Sorted.of(model.loss).main)
        if flops(eqn) and at not in (0, *model.cuts)
    ]
    return build_graph(model.loss, model.cuts, products[-1:])


def readers(model: Traced) -> list[tuple[int, ...]]:
    return [parameter.readers for parameter in model.graph.parameters]


@pytest.mark.parametrize("examples", [1, 2, 8])
def test_layers_have_the_parameters_that_they_had(examples: int) -> None:
    present = traced(loss_fn, 4)
    for model in (present, split_before_a_product(present)):
        again = reshaped(traced(loss_fn, examples).loss, model)
        assert readers(again) == readers(model)
        assert [layer.name for layer in again.graph.layers] == [
            layer.name for layer in model.graph.layers
        ]
    counts = [len(Sorted.of(at.loss).main) for at in (present, traced(loss_fn, examples))]
    assert (counts[0] > counts[1]) == (examples == 1)


def test_layers_that_would_have_other_parameters_are_refused() -> None:
    def shorter(params: Any, x: Any, rng: Any) -> jax.Array:
        return loss_fn(params if len(x) > 1 else params[2:], x, rng)

    present = traced(shorter, 4)
    split = split_before_a_product(present)
    for model, message in (
        (present, "its layers read other parameters"),
        (split, "it has 4 products, not 6"),
    ):
        with pytest.raises(OtherLayersError, match=message):
            reshaped(traced(shorter, 1).loss, model)
