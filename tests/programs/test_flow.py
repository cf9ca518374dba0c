"""Placed equations as pieces: two layers and a norm between them, by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.programs.flow import Flow
from jvpipe.programs.ownership import place_operands
from jvpipe.programs.pieces import Slot, SlotKind
from jvpipe.programs.places import Input, Output
from jvpipe.programs.straight_line import straight_line
from jvpipe.trace.jaxprs import evaluate_jaxpr

LARGE = jax.ShapeDtypeStruct((1000,), np.float32)
GRADIENTS = [Slot(SlotKind.GRADIENT, i) for i in (0, 1)]
PARAMETERS = [Slot(SlotKind.PARAMETER, i) for i in (0, 1)]


def clipped(a: Any, b: Any) -> Any:
    root = jnp.sqrt(jnp.sum(jnp.sin(a) ** 2) + jnp.sum(jnp.sin(b) ** 2))
    return jnp.sin(a) / root, jnp.sin(b) / root


@pytest.fixture(scope="module")
def flow() -> Flow:
    jaxpr = straight_line(clipped, LARGE, LARGE).jaxpr
    outputs = [Output(v, i, PARAMETERS[i]) for i, v in enumerate(jaxpr.outvars)]
    at = place_operands(
        jaxpr.eqns, {v: Input(i, "ab"[i]) for i, v in enumerate(jaxpr.invars)}, outputs
    )
    return Flow(
        jaxpr.eqns, {}, dict(zip(jaxpr.invars, GRADIENTS, strict=True)), outputs, at, [0, 1]
    )


def test_what_a_layer_makes_for_another_goes_by_the_global_program(flow: Flow) -> None:
    who = [flow.readers[var] for var in flow.inputs]
    assert who == [{0}, {1}]
    crossing = {
        frozenset(homes)
        for var, homes in flow.readers.items()
        if flow.placement.of(var).home == "global"
    }
    assert frozenset({0, 1}) in crossing


def test_layers_and_the_global_program_take_turns(flow: Flow) -> None:
    pieces = flow.pieces()
    assert [(piece.layer, piece.phase) for piece in pieces] == [
        (0, 0),
        (1, 0),
        (None, 0),
        (0, 1),
        (1, 1),
    ]
    partial = [Slot(SlotKind.PARTIAL, 0, layer, "float32") for layer in (0, 1)]
    answer = Slot(SlotKind.GLOBAL, 0, 0, "float32")
    assert [piece.writes for piece in pieces[:3]] == [(partial[0],), (partial[1],), (answer,)]
    assert pieces[2].reads == tuple(partial)
    assert [answer in piece.reads for piece in pieces[3:]] == [True, True]
    assert [piece.writes for piece in pieces[3:]] == [(PARAMETERS[0],), (PARAMETERS[1],)]


def test_pieces_one_after_another_compute_what_the_whole_does(flow: Flow) -> None:
    a, b = (np.linspace(i, i + 1, 1000, dtype=np.float32) for i in (0, 1))
    arrays: dict[Slot, Any] = dict(zip(GRADIENTS, (jnp.asarray(a), jnp.asarray(b)), strict=True))
    for piece in flow.pieces():
        arrays |= zip(
            piece.writes,
            evaluate_jaxpr(piece.program, [arrays[slot] for slot in piece.reads]),
            strict=True,
        )
    for slot, expected in zip(PARAMETERS, clipped(jnp.asarray(a), jnp.asarray(b)), strict=True):
        np.testing.assert_allclose(arrays[slot], expected, rtol=1e-6)
