"""Under a stream nothing may need a value of all layers at once; a synchronous schedule gives
it.
"""

from typing import Any

import jax
import optax
import pytest

from jvpipe.schedules import PipeDream, find_schedule
from jvpipe.session.settings import OptimizerCutter, Training
from jvpipe.trace.stacks import Stacks
from tests.session.tiny import MICRO, PARAMS, begun, loss_fn

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


def cutter(optimizer: Any, grad_norm: bool) -> OptimizerCutter:
    settings = Training(
        loss_fn=loss_fn,
        optimizer=optimizer,
        microbatches=MICRO,
        schedule=PipeDream(),
        grad_norm=grad_norm,
    )
    return OptimizerCutter(settings, PARAMS, Stacks(jax.tree.structure(PARAMS), (None,) * 3))


@pytest.mark.parametrize(
    ("optimizer", "grad_norm", "name"),
    [(CLIPPED, False, "clip"), (optax.sgd(0.1), True, "grad_norm")],
)
def test_a_norm_of_all_layers_is_refused_under_a_stream_alone(
    optimizer: Any, grad_norm: bool, name: str
) -> None:
    graph = begun()[0].session.graph
    with pytest.raises(
        ValueError, match=rf"{name}.* needs a value of all layers at once, which pipedream"
    ):
        cutter(optimizer, grad_norm).cut(graph, PipeDream())
    cut = cutter(optimizer, grad_norm).cut(graph, find_schedule("1f1b"))
    assert {piece.layer for piece in cut.update} >= {0, 1, 2}


def test_a_layer_by_itself_may_be_clipped_under_a_stream() -> None:
    optimizer = optax.chain(optax.clip(1.0), optax.sgd(0.1))
    cut = cutter(optimizer, grad_norm=False).cut(begun()[0].session.graph, PipeDream())
    assert not cut.cross_layer
