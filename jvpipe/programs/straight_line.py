"""Functions traced as straight lines: lists of equations without calls and branches.

Calls are inlined, and all sides of a branch run. So each equation of an optimizer can be placed
separately (see `jvpipe.programs.ownership`).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn
from jvpipe.programs.transformations import scope_of
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.inline import JITS, inlined

Apply = Callable[[JaxprEqn, list[Any]], list[Any]]


def straight_line(fn: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Traces `fn` without calls and branches.

    All branches of a `cond` run, and `select_n` picks the results of one of them. The other
    branches have no side effects, because `ownership.py` refuses an optimizer with side effects.
    """
    return straightened(standard(jax.make_jaxpr)(fn)(*args))


def straight_body(scan: JaxprEqn) -> ClosedJaxpr:
    """Returns the body of a scan without calls and branches, as `straight_line` does."""
    traced = scan.params["jaxpr"]
    return straight_line(lambda *values: jaxprs.evaluate_jaxpr(traced, values), *traced.in_avals)


def standard(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `trace` with JAX's default promotion rules, which optax expects, for any settings."""

    def traced(fn: Callable[..., Any], *args: Any) -> Any:
        def standard(*args: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return fn(*args)

        return trace(standard, *args)

    return traced


def straightened(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a traced function without calls and branches."""
    closed = inlined(traced, JITS)
    if not any(map(_jax.inner_jaxprs, closed.jaxpr.eqns)):
        return closed
    # An expanded body may contain further calls. The loop ends, because each iteration removes a
    # level of nesting.
    closed = _retraced(traced)
    while any(eqn.primitive.name in _EXPANDED for eqn in closed.jaxpr.eqns):
        closed = _retraced(closed)
    return closed


def _retraced(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Traces a function again; branches and derivative rules are expanded, and calls inlined."""

    def run(*values: Any) -> list[Any]:
        return jaxprs.evaluate_jaxpr(closed, values, _expand)

    return flatten(run, *closed.in_avals)


def _expand(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs an equation, and expands it if it has branches or a derivative rule."""
    with jax.named_scope(scope_of(eqn)):
        return _EXPANDED.get(eqn.primitive.name, _jax.bind)(eqn, values)


def _cond(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs all branches, and picks the results of one."""
    index, *operands = values
    branches = eqn.params["branches"]
    results = [jaxprs.evaluate_jaxpr(branch, operands, _expand) for branch in branches]
    # Like `cond`, clamp an index that is out of range.
    last = np.int32(len(branches) - 1)
    which = jax.lax.clamp(np.int32(0), index, last)
    by_result = zip(*results, strict=True)
    return [jax.lax.select_n(which, *cases) for cases in by_result]


def _primal(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs a function without its derivative rule, because no derivative is taken here."""
    return jaxprs.evaluate_jaxpr(eqn.params["call_jaxpr"], values, _expand)


_EXPANDED: dict[str, Apply] = {
    "cond": _cond,
    "custom_jvp_call": _primal,
    "custom_vjp_call": _primal,
}
