"""Convolutions with their axes in the order that XLA's convolution library on CPUs expects.

XLA on CPUs hands a convolution to a library if its axes have the library's order. In the main
function of a program, XLA puts transposes around a convolution to give its axes that order. In a
function that the main function calls, XLA adds no transposes: the convolution becomes a loop, which
is slow and sums in another order. So this module adds them. With one axis of space (rows):

    operand    batch, features, rows  ->  batch, rows, features
    filter     out, in, rows          ->  rows, in, out
    result     batch, rows, features  ->  batch, features, rows

The library has no bfloat16, so XLA convolves in float32 and rounds the result. If an equation then
converts the rounded result to float32, XLA skips both conversions and passes on the float32 result.
XLA does not find such equations behind a transpose. So here the convolution and its transpose stay
in float32, and equations that convert to float32 get the result before it is rounded:

    convolution -> transpose -> round -> equations that read bfloat16
                             -> equations that convert to float32
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, JaxprEqn
from jvpipe.trace import jaxprs


def in_order(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same function with transposes around its convolutions, as XLA would put them.

    Only CPUs run the transposed convolutions; other devices run the original ones.
    """
    if all(eqn.primitive.name != "conv_general_dilated" for eqn in closed.jaxpr.eqns):
        return closed

    def run(*values: Any) -> list[Any]:
        wide: dict[Atom, Any] = {}  # float32 results of convolutions, before they are rounded

        def applied(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
            if eqn.primitive.name == "conv_general_dilated":
                rounded, whole = _convolved(eqn, values)
                if whole.dtype != rounded.dtype:
                    wide[eqn.outvars[0]] = whole
                return [rounded]
            if _widens(eqn) and eqn.invars[0] in wide:
                return [wide[eqn.invars[0]]]
            return _jax.bind(eqn, values)

        return jaxprs.evaluate_jaxpr(closed, values, applied)

    return jax.make_jaxpr(run)(*closed.in_avals)


def _widens(eqn: JaxprEqn) -> bool:
    is_cast = eqn.primitive.name == "convert_element_type"
    return is_cast and eqn.params["new_dtype"] == jnp.float32


def _convolved(eqn: JaxprEqn, values: list[Any]) -> tuple[Any, Any]:
    """Returns the result of a convolution, and the same result before it is rounded.

    The two have different values only for bfloat16 on CPUs.
    """
    dtype = _jax.aval(eqn.outvars[0]).dtype

    def here(*values: Any) -> tuple[Any, Any]:
        whole = turned(eqn, values)
        return whole.astype(dtype), whole

    def elsewhere(*values: Any) -> tuple[Any, Any]:
        (out,) = _jax.bind(eqn, values)
        return out, out.astype(_exact(dtype))

    return jax.lax.platform_dependent(
        *values,
        cpu=here,
        default=elsewhere,
    )


def _exact(dtype: Any) -> Any:
    """Returns the type in which CPUs compute a convolution of a given type."""
    return jnp.float32 if dtype == jnp.bfloat16 else dtype


def turned(eqn: JaxprEqn, values: Sequence[Any]) -> Any:
    """Applies a convolution with its axes in the library's order.

    For bfloat16 the result is float32 and not yet rounded.

    >>> x, w = jax.numpy.ones((1, 2, 8)), jax.numpy.ones((3, 2, 5))
    >>> (eqn,) = jax.make_jaxpr(lambda x, w: jax.lax.conv(x, w, (1,), "SAME"))(x, w).eqns
    >>> closed = jax.make_jaxpr(lambda *xs: turned(eqn, xs))(x, w)
    >>> [(str(eqn.primitive), eqn.outvars[0].aval.shape) for eqn in closed.eqns]
    [('transpose', (1, 8, 2)), ('transpose', (5, 2, 3)), ('conv_general_dilated', (1, 8, 3)), ('transpose', (1, 3, 8))]
    """
    numbers = eqn.params["dimension_numbers"]
    operand = _last(*numbers.lhs_spec)
    out_features, in_features, *space = numbers.rhs_spec
    filters = (*space, in_features, out_features)
    result = _last(*numbers.out_spec)
    usual = tuple(range(len(operand)))
    # Axes of features come last: an image has one of them, a filter has two.
    image = _first(usual)
    filter_ = (usual[-1], usual[-2], *usual[:-2])
    inner = type(numbers)(image, filter_, image)
    params = eqn.params | {"dimension_numbers": inner}
    if (dtype := _jax.aval(eqn.outvars[0]).dtype) == jnp.bfloat16:
        params["preferred_element_type"] = _exact(dtype)
        # The convolution converts its operands to float32. Without the barrier, XLA might use the
        # operands' values from before they were rounded to bfloat16.
        values = jax.lax.optimization_barrier(values)
    moved = list(map(_moved, values, (operand, filters)))
    (out,) = _jax.bind(eqn.replace(params=params), moved)
    return _moved(out, tuple(np.argsort(result).tolist()))


def _last(
    batch: int,
    feature: int,
    *space: int,
) -> tuple[int, ...]:
    """Returns an array's axes in the library's order: batch, space, features."""
    return (batch, *space, feature)


def _first(usual: Sequence[int]) -> tuple[int, ...]:
    """Returns, for an array with features last, its axes in the order batch, features, space."""
    return (usual[0], usual[-1], *usual[1:-1])


def _moved(x: Any, axes: tuple[int, ...]) -> Any:
    is_in_order = axes == tuple(range(len(axes)))
    return x if is_in_order else jax.lax.transpose(x, axes)
