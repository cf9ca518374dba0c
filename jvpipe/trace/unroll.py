"""A scan over stacked layers, run iteration by iteration, so that it can be cut between them.

While a jaxpr is flattened, an array that is known slice by slice travels as a `Stack`. A scan over
stacks of layers takes their slices as they are; any other equation gets the whole array.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, Jaxpr, JaxprEqn
from jvpipe.trace.keys import is_key, take

STACKING = "stack_layers"
SLICEWISE = ("convert_element_type", "copy", "stop_gradient")
"""Primitives that do to a stack what they do to each of its slices."""


@jax.jit
def stack_layers(*slices: Any) -> jax.Array:
    """Stacks arrays along a new first axis; flattening recognises this function by its name."""
    return jax.numpy.stack(slices)


@dataclass(frozen=True)
class Stack:
    """An array that is known slice by slice.

    Attributes:
        part: returns the slice at an index.
        whole: returns the array.
        layers: its slices belong to layers, so that a scan over it is unrolled.
    """

    part: Callable[[int], Any]
    as_array: Callable[[], Any]
    layers: bool


def as_array(value: Any) -> Any:
    """Returns a value as an array."""
    return value.as_array() if isinstance(value, Stack) else value


def stacked_result(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """Returns the result of an equation as a stack; None if it makes none."""
    name = eqn.primitive.name
    if name in ("jit", "pjit") and eqn.params["name"] == STACKING:
        return [Stack(values.__getitem__, cache(lambda: jax.numpy.stack(values)), True)]
    # Numbers along an axis, such as those of the layers: each slice is a constant.
    if name == "iota" and len(eqn.params["shape"]) == 1:
        dtype = eqn.params["dtype"]
        array = cache(lambda: _jax.bind(eqn, [])[0])
        return [Stack(lambda i: np.asarray(i, dtype)[()], array, False)]
    if name in SLICEWISE and isinstance(values[0], Stack):
        (source,) = values

        def of(value: Any) -> Any:
            return _jax.bind(eqn, [value])[0]

        array = cache(lambda: of(source.as_array()))
        return [Stack(lambda i: of(source.part(i)), array, source.layers)]
    return None


def stacks_layers(jaxpr: Jaxpr, calls: Mapping[str, str]) -> bool:
    """Tells whether layers are stacked in a jaxpr, or in one that it calls, and perhaps scanned
    over.

    Args:
        jaxpr: in which.
        calls: the names of equations that are calls, and the parameter that has the body of each.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in calls:
            body = eqn.params[calls[eqn.primitive.name]]
            inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            if eqn.params.get("name") == STACKING or stacks_layers(inner, calls):
                return True
    return False


def is_late(eqn: JaxprEqn, of_late: bool) -> bool:
    """Tells whether an equation makes numbers along an axis, or casts such: it is put off until
    they are read.

    Args:
        eqn: the equation.
        of_late: one of its operands was put off.
    """
    name = eqn.primitive.name
    is_iota = name == "iota" and len(eqn.params["shape"]) == 1
    return is_iota or (name in SLICEWISE and of_late)


def unrolled(
    eqn: JaxprEqn,
    values: Sequence[Any],
    run: Callable[[Sequence[Any]], list[Any]],
) -> list[Any] | None:
    """Runs a scan over layers, iteration by iteration.

    Returns None if the equation is anything else.

    Args:
        eqn: a scan, or not.
        values: its operands.
        run: does one iteration.
    """
    if eqn.primitive.name != "scan":
        return None
    constants, carry, xs = _jax.scan_operands(eqn, values)
    if not any(isinstance(x, Stack) and x.layers for x in xs):
        return None
    rows = range(eqn.params["length"])
    ys: dict[int, list[Any]] = {}
    # A reversed scan runs from the last slice to the first, and its ys keep the order of the
    # slices.
    for i in reversed(rows) if eqn.params["reverse"] else rows:
        out = run([*constants, *carry, *(_part(x, i) for x in xs)])
        carry, ys[i] = out[: len(carry)], out[len(carry) :]
    stacks = [_stack_of([ys[i][k] for i in rows]) for k in range(len(ys[0]))]
    return [*carry, *stacks]


def _part(x: Any, i: int) -> Any:
    """Returns what an iteration reads of an array that a scan goes over."""
    if isinstance(x, Stack):
        return x.part(i)
    if is_key(x):
        starts = (i, *[0] * (x.ndim - 1))
        sizes = (1, *x.shape[1:])
        return jax.lax.squeeze(take(x, starts, sizes), (0,))
    return jax.lax.index_in_dim(x, i, keepdims=False)


def _stack_of(parts: list[Any]) -> Stack:
    array = cache(lambda: jax.numpy.stack(list(map(as_array, parts))))
    return Stack(parts.__getitem__, array, False)
