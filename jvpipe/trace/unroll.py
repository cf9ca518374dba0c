"""Runs a scan over stacked layers iteration by iteration, so that it can be cut between layers.

While a jaxpr is flattened, an array whose slices are known one by one is passed on as a `Stack`. A
scan over stacks of layers takes the slices from it; any other equation gets the whole array.
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
"""The name of `stack_layers` in a jaxpr, by which its calls are recognized."""
SLICEWISE = ("convert_element_type", "copy", "stop_gradient")
"""Primitives that act on each slice of a stack as they act on the whole stack."""


@jax.jit
def stack_layers(*slices: Any) -> jax.Array:
    """Stacks arrays along a new first axis; flattening recognizes this function by `STACKING`."""
    return jax.numpy.stack(slices)


@dataclass(frozen=True)
class Stack:
    """An array whose slices are known one by one.

    Attributes:
        part: returns the slice at an index.
        as_array: returns the whole array.
        layers: whether the slices belong to layers, so that a scan over the stack is unrolled.
    """

    part: Callable[[int], Any]
    as_array: Callable[[], Any]
    layers: bool


def as_array(value: Any) -> Any:
    """Returns a value, which may be a `Stack`, as an array."""
    return value.as_array() if isinstance(value, Stack) else value


def stacked_result(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """Returns the result of an equation as a stack; None if the equation does not make a stack."""
    name = eqn.primitive.name
    if name in ("jit", "pjit") and eqn.params["name"] == STACKING:
        return [Stack(values.__getitem__, cache(lambda: jax.numpy.stack(values)), True)]
    # The elements of a one-dimensional iota, such as the layers' numbers, are constants.
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
    """Tells whether a jaxpr, or one that it calls, calls `stack_layers`.

    Args:
        jaxpr: the jaxpr.
        calls: the names of primitives that are calls, each with the parameter that has its body.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in calls:
            body = eqn.params[calls[eqn.primitive.name]]
            inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            if eqn.params.get("name") == STACKING or stacks_layers(inner, calls):
                return True
    return False


def is_late(eqn: JaxprEqn, of_late: bool) -> bool:
    """Tells whether an equation is put off until its result is read: an iota, or a cast of one.

    Args:
        eqn: the equation.
        of_late: whether one of its operands was put off.
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

    Args:
        eqn: any equation.
        values: its operands.
        run: runs one iteration.

    Returns:
        The results of the scan; None if the equation is not a scan over layers.
    """
    if eqn.primitive.name != "scan":
        return None
    constants, carry, xs = _jax.scan_operands(eqn, values)
    if not any(isinstance(x, Stack) and x.layers for x in xs):
        return None
    rows = range(eqn.params["length"])
    ys: dict[int, list[Any]] = {}
    # A reversed scan runs from the last slice to the first, but the rows of its ys are in the order
    # of the slices.
    for i in reversed(rows) if eqn.params["reverse"] else rows:
        out = run([*constants, *carry, *(_part(x, i) for x in xs)])
        carry, ys[i] = out[: len(carry)], out[len(carry) :]
    stacks = [_stack_of([ys[i][k] for i in rows]) for k in range(len(ys[0]))]
    return [*carry, *stacks]


def _part(x: Any, i: int) -> Any:
    """Returns the slice that iteration `i` reads from an array that a scan goes over."""
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
