"""The names of the transformations that an optimizer's equations come from.

A transformation is a part of an optimizer with a separate `init` and `update`, such as
`clip_by_global_norm`. When JAX traces an optimizer, each equation records its call stack, in which
this module finds the transformation. If the equations are traced again, the new call stacks do not
show the transformation. So equations are traced again under a name scope (`scope_of`) that ends
with the transformation. Messages and `OptimizerCut.cross_layer` use these names.
"""

from collections.abc import Callable
from typing import Any

from jvpipe import _jax
from jvpipe._jax import JaxprEqn


def transformation(eqn: JaxprEqn) -> str:
    """Returns the transformation that an equation comes from, such as `clip_by_global_norm`."""
    return scope_of(eqn).rpartition("/")[2]


def scope_of(eqn: JaxprEqn) -> str:
    """Returns the name scope of an equation, which ends with its transformation."""
    return "/".join(filter(None, (_jax.scope(eqn), _traced_in(eqn))))


def _traced_in(eqn: JaxprEqn) -> str:
    """Returns the factory of the innermost `update` or `init` that traced an equation.

    The factory is the function that returned the `update` or `init`: `adam` is the factory of
    `adam.<locals>.update_fn`. The equation's call stack is searched from the inside out. If no
    frame is an `update` or `init`, the outermost function of the optimizer is returned.
    """
    factory, outer = "", ""
    for file, function in _jax.call_stack(eqn):
        if function == call_optimizer.__name__ and file == __file__:
            return factory or outer
        name, _, method = function.rpartition(".")
        is_traced = method in ("update", "update_fn", "init", "init_fn")
        if name and is_traced and not factory:
            factory = name.partition(".")[0]
        outer = function.partition(".")[0]
    return ""


def call_optimizer(method: Callable[..., Any], *args: Any) -> Any:
    """Calls `init` or `update`, and so marks where the optimizer begins in a call stack."""
    try:
        return method(*args)
    except TypeError as error:
        # Optimizers that need the loss function or its value have required keyword-only arguments.
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            f"{error}: a pipeline passes only gradients, state and parameters to an update. Use an "
            "optimizer that needs no other arguments (for L-BFGS: linesearch=None)"
        ) from error
