"""Jaxprs as lists of equations: run, prune, silence."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

DEBUGGING = ("debug_callback", "debug_print")


def run(
    eqns: Iterable[JaxprEqn],
    env: dict[Var, Any],
    apply: Callable[[JaxprEqn, list[Any]], list[Any]] = _jax.bind,
) -> None:
    """Runs equations in order; reads from and writes to `env`.

    Args:
        eqns: in order.
        env: the values of variables; it is added to.
        apply: runs an equation on values.
    """
    for eqn in eqns:
        env.update(zip(eqn.outvars, apply(eqn, read(eqn.invars, env)), strict=True))


def read(atoms: Iterable[Atom], env: dict[Var, Any]) -> list[Any]:
    """The values of variables and literals."""
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in atoms]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among atoms, without literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def prune(eqns: Sequence[JaxprEqn], wanted: Iterable[Atom]) -> list[JaxprEqn]:
    """The equations that `wanted` depends on, and those with effects, in their order."""
    live: set[Var] = set(variables(wanted))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(variables(eqn.invars))
    return kept[::-1]


def silent(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same without what only prints and the like, `jax.debug.callback`: for recomputing.

    >>> import jax
    >>> def loud(x):
    ...     jax.debug.print("{}", x)
    ...     return x + 1.0
    >>> [str(eqn.primitive) for eqn in silent(jax.make_jaxpr(loud)(1.0)).jaxpr.eqns]
    ['add']
    """
    effects = {effect for eqn in every(closed.jaxpr.eqns) if eqn.primitive.name in DEBUGGING for effect in eqn.effects}
    return ClosedJaxpr(_without(closed.jaxpr, effects), closed.consts) if effects else closed


def _without(jaxpr: Jaxpr, effects: set[Any]) -> Jaxpr:
    def quiet(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(_without(value.jaxpr, effects), value.consts)
        if isinstance(value, (tuple, list)):
            return type(value)(map(quiet, value)) if type(value) in (tuple, list) else value
        return _without(value, effects) if isinstance(value, Jaxpr) else value

    eqns = [
        eqn.replace(params={k: quiet(v) for k, v in eqn.params.items()}, effects=frozenset(eqn.effects - effects))
        for eqn in jaxpr.eqns
        if eqn.primitive.name not in DEBUGGING
    ]
    return jaxpr.replace(eqns=prune(eqns, jaxpr.outvars), effects=frozenset(jaxpr.effects - effects))


def every(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations, and those inside of their loops and calls."""
    for eqn in eqns:
        yield eqn
        for inner in _jax.inner_jaxprs(eqn):
            yield from every(inner.eqns)


def free_variables(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations read and do not define, in the order of their first reading."""
    defined: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        free.update((var, None) for var in variables(eqn.invars) if var not in defined)
        defined.update(eqn.outvars)
    return list(free)
