"""A scan over stacked layers, run iteration by iteration, so that it can be cut between them.

While a jaxpr is flattened, an array that is known slice by slice travels as a `Stack`. A scan over stacks of layers
takes their slices as they are; whoever wants anything else gets the whole array.
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
SLICEWISE = (
    "convert_element_type",
    "copy",
    "stop_gradient",
)  # what is done to a stack is done to its slices


@jax.jit
def stack_layers(*slices: Any) -> jax.Array:
    """Stacks arrays along a new first axis; flattening knows this function by its name."""
    return jax.numpy.stack(slices)


@dataclass(frozen=True)
class Stack:
    """An array, `whole()`, known slice by slice, `part(i)`; a scan over one of `layers` is unrolled."""

    part: Callable[[int], Any]
    whole: Callable[[], Any]
    layers: bool


def whole(value: Any) -> Any:
    """A value, no longer as a stack."""
    return value.whole() if isinstance(value, Stack) else value


def stacked(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """The result of an equation as a stack, if it makes one."""
    name = eqn.primitive.name
    if name in ("jit", "pjit") and eqn.params["name"] == STACKING:
        return [Stack(values.__getitem__, cache(lambda: jax.numpy.stack(values)), True)]
    if name == "iota" and len(eqn.params["shape"]) == 1:
        dtype = eqn.params["dtype"]
        return [
            Stack(lambda i: np.asarray(i, dtype)[()], cache(lambda: _jax.bind(eqn, [])[0]), False)
        ]
    if name in SLICEWISE and isinstance(values[0], Stack):
        (source,) = values

        def of(value: Any) -> Any:
            return _jax.bind(eqn, [value])[0]

        return [
            Stack(lambda i: of(source.part(i)), cache(lambda: of(source.whole())), source.layers)
        ]
    return None


def stacks_layers(jaxpr: Jaxpr, calls: Mapping[str, str]) -> bool:
    """Tells whether layers are stacked in a jaxpr, or in one that it calls, and perhaps scanned over.

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
    """Tells whether an equation makes a stack that is no layers': numbers along an axis, or what is done to these."""
    name = eqn.primitive.name
    return (name == "iota" and len(eqn.params["shape"]) == 1) or (name in SLICEWISE and of_late)


def unrolled(
    eqn: JaxprEqn, values: Sequence[Any], run: Callable[[Sequence[Any]], list[Any]]
) -> list[Any] | None:
    """The results of a scan over layers, whose iterations `run` does; None if the equation is anything else.

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
    outputs: dict[int, list[Any]] = {}
    for i in reversed(rows) if eqn.params["reverse"] else rows:
        out = run([*constants, *carry, *(_part(x, i) for x in xs)])
        carry, outputs[i] = out[: len(carry)], out[len(carry) :]
    return [*carry, *(_stack_of([outputs[i][k] for i in rows]) for k in range(len(outputs[0])))]


def _part(x: Any, i: int) -> Any:
    if isinstance(x, Stack):
        return x.part(i)
    if is_key(x):
        return jax.lax.squeeze(take(x, (i, *[0] * (x.ndim - 1)), (1, *x.shape[1:])), (0,))
    return jax.lax.index_in_dim(x, i, keepdims=False)


def _stack_of(parts: list[Any]) -> Stack:
    return Stack(
        parts.__getitem__, cache(lambda: jax.numpy.stack([whole(p) for p in parts])), False
    )
