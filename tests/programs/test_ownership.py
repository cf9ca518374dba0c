"""Where equations of an optimizer run: small examples whose placement is plain."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.programs.ownership import check_owned, destinations, place_operands
from jvpipe.programs.pieces import Slot, SlotKind
from jvpipe.programs.places import Input, Output, Place
from jvpipe.programs.straight_line import straight_line

LARGE, SCALAR = jax.ShapeDtypeStruct((1000,), np.float32), jax.ShapeDtypeStruct((), np.float32)
LAYERS = [Input(0, "a"), Input(1, "b")]


def placed(
    fn: Callable[..., Any], shapes: list[Any], homes: list[Any], inputs: list[Input]
) -> list[Place]:
    """The places of the results of a function; `homes` say who needs them."""
    jaxpr = straight_line(fn, *shapes).jaxpr
    named = enumerate(zip(jaxpr.outvars, homes, strict=True))
    outputs = [Output(v, home, Slot(SlotKind.PARAMETER, i)) for i, (v, home) in named]
    given = dict(zip(jaxpr.invars, inputs, strict=True))
    at = place_operands(jaxpr.eqns, given, outputs)
    check_owned(jaxpr.eqns, given, outputs, at)
    return [at.of(out.atom) for out in outputs]


def test_what_is_made_of_one_layers_values_stays_there() -> None:
    assert placed(lambda a, b: (a * 2, b + 1), [LARGE, LARGE], [0, 1], LAYERS) == [
        Place(0, 0),
        Place(1, 0),
    ]


def test_a_norm_goes_by_the_global_program_and_is_back_a_phase_later() -> None:
    def clipped(a: Any, b: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(a * a) + jnp.sum(b * b))
        return norm, a / norm, b / norm

    norm, a, b = placed(clipped, [LARGE, LARGE], ["everywhere", 0, 1], LAYERS)
    assert norm.home == "global"
    assert (a, b) == (Place(0, norm.phase + 1), Place(1, norm.phase + 1))


def test_what_is_made_of_replicated_values_is_made_everywhere() -> None:
    assert placed(lambda t: [t + 1], [SCALAR], ["everywhere"], [Input("everywhere")]) == [
        Place("everywhere", 0)
    ]


def test_large_arrays_do_not_cross() -> None:
    with pytest.raises(
        ValueError,
        match=r"arrays of several layers in one add\. The arrays are computed from 'a', 'b'",
    ):
        placed(lambda a, b: [a + b], [LARGE, LARGE], [0], LAYERS)
    with pytest.raises(
        ValueError, match=r"makes parameter 0 of 'b', which belong to another layer"
    ):
        placed(lambda a, b: [b * 2], [LARGE, LARGE], [0], LAYERS)


def test_a_value_is_for_the_only_layer_whose_results_depend_on_it() -> None:
    jaxpr = straight_line(lambda a, b: (a * 2, b + a[0]), LARGE, LARGE).jaxpr
    outputs = [Output(v, i, Slot(SlotKind.PARAMETER, i)) for i, v in enumerate(jaxpr.outvars)]
    reached = destinations(jaxpr.eqns, outputs)
    assert [reached[v] for v in jaxpr.invars] == ["everywhere", 1]


def test_side_effects_are_refused() -> None:
    def shouting(a: Any) -> Any:
        jax.debug.print("{}", a[0])
        return [a]

    with pytest.raises(ValueError, match="an optimizer with side effects cannot be cut"):
        placed(shouting, [LARGE], [0], LAYERS[:1])
