"""Functions that run and prune jaxprs, remove debug calls, and list variables of equations.

A jaxpr is in static single assignment form: each variable is defined once, before it is read. So a
pass forward meets every value before its readers. A pass backward, such as `prune`'s, meets all
readers of a value before the equation that defines it.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

DEBUGGING = ("debug_callback", "debug_print")
"""The primitives of `jax.debug`."""


def run_jaxpr(
    eqns: Iterable[JaxprEqn],
    env: dict[Var, Any],
    apply: Callable[[JaxprEqn, list[Any]], list[Any]] = _jax.bind,
) -> None:
    """Runs equations in order; reads operands from `env`, and writes results to it.

    Args:
        eqns: the equations, each after the equations that make its operands.
        env: the values of variables.
        apply: runs an equation on values.
    """
    for eqn in eqns:
        results = apply(eqn, read_by(eqn.invars, env))
        env.update(zip(eqn.outvars, results, strict=True))


def evaluate_jaxpr(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    apply: Callable[[JaxprEqn, list[Any]], list[Any]] = _jax.bind,
) -> list[Any]:
    """Runs a jaxpr on values.

    Args:
        closed: the jaxpr.
        args: its arguments.
        apply: runs an equation on values.

    Returns:
        The results of the jaxpr.
    """
    inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    env = dict(zip(inputs, [*closed.consts, *args], strict=True))
    run_jaxpr(closed.jaxpr.eqns, env, apply)
    return read_by(closed.jaxpr.outvars, env)


def shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of a value, with which JAX can trace in place of an array."""
    aval = _jax.aval(atom)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def size_of(atom: Atom) -> int:
    """Returns the number of elements of a value."""
    return math.prod(_jax.aval(atom).shape)


def bytes_of(atom: Atom) -> int:
    """Returns the number of bytes of a value."""
    return size_of(atom) * _jax.aval(atom).dtype.itemsize


def read_by(atoms: Iterable[Atom], env: dict[Var, Any]) -> list[Any]:
    """Returns the values of variables and literals."""
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in atoms]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the variables among atoms, without literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def prune(eqns: Sequence[JaxprEqn], results: Iterable[Atom]) -> list[JaxprEqn]:
    """Returns the equations that `results` depend on, and those with effects, in their order."""
    # A value is live if an equation that is kept reads it. An equation without effects is kept if
    # one of its results is live.
    live: set[Var] = set(variables(results))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(variables(eqn.invars))
    return kept[::-1]


def yielding(closed: ClosedJaxpr, results: Sequence[Atom]) -> ClosedJaxpr:
    """Returns a jaxpr with other results, pruned to the equations that these need.

    Args:
        closed: the jaxpr.
        results: the new results: variables of the jaxpr, or literals.
    """
    jaxpr = closed.jaxpr
    narrowed = jaxpr.replace(eqns=prune(jaxpr.eqns, results), outvars=list(results))
    return ClosedJaxpr(narrowed, closed.consts)


def silent(closed: ClosedJaxpr, heard: Collection[Hashable] | None = None) -> ClosedJaxpr:
    """Returns a jaxpr without calls of `jax.debug`, so that recomputing does not print again.

    Args:
        closed: any jaxpr.
        heard: the calls to remove, as `debug_calls` returns them; None for all.

    >>> import jax
    >>> def loud(x):
    ...     jax.debug.print("{}", x)
    ...     return x + 1.0
    >>> [str(eqn.primitive) for eqn in silent(jax.make_jaxpr(loud)(1.0)).jaxpr.eqns]
    ['add']
    """
    calls = debug_calls(closed)
    left_out = calls if heard is None else calls & set(heard)
    return ClosedJaxpr(_without(closed.jaxpr, left_out), closed.consts) if left_out else closed


def debug_calls(closed: ClosedJaxpr) -> set[Hashable]:
    """Returns a key for each call of `jax.debug`; another trace of the loss has the same keys."""
    calls = (eqn for eqn in every(closed.jaxpr.eqns) if eqn.primitive.name in DEBUGGING)
    return set(map(_call_key, calls))


def _call_key(eqn: JaxprEqn) -> Hashable:
    """Returns the key of a call: the ids of its parameters, which are the same in another trace."""
    identities = ((name, id(value)) for name, value in eqn.params.items())
    return tuple(sorted(identities))


def _without(jaxpr: Jaxpr, calls: Collection[Hashable]) -> Jaxpr:
    """Returns a jaxpr without some calls of `jax.debug`.

    A loop or call loses its effects if no equation with effects is left in its body.
    """
    quiet = partial(_without, calls=calls)

    def quieted(eqn: JaxprEqn) -> JaxprEqn:
        params = {name: with_bodies(quiet, value) for name, value in eqn.params.items()}
        changed = eqn.replace(params=params)
        inner = _jax.inner_jaxprs(changed)
        if not inner or not changed.effects:
            return changed
        return changed.replace(effects=_effects(inner))

    def is_kept(eqn: JaxprEqn) -> bool:
        return eqn.primitive.name not in DEBUGGING or _call_key(eqn) not in calls

    kept = filter(is_kept, jaxpr.eqns)
    eqns = prune([quieted(eqn) for eqn in kept], jaxpr.outvars)
    return jaxpr.replace(eqns=eqns, effects=_effects([jaxpr.replace(eqns=eqns)]))


def with_bodies(act: Callable[..., Jaxpr], value: Any, *others: Any) -> Any:
    """Returns a parameter of an equation with its jaxprs, which may be in tuples, replaced.

    Args:
        act: makes a jaxpr of the one that it replaces and those at the same place in `others`.
        value: the parameter.
        others: the same parameter of other equations.
    """
    match value:
        case ClosedJaxpr():
            return ClosedJaxpr(act(value.jaxpr, *(x.jaxpr for x in others)), value.consts)
        case Jaxpr():
            return act(value, *others)
        # A subclass is returned as it is, because its constructor may be different.
        case tuple() | list() if type(value) in (tuple, list):
            return type(value)(map(partial(with_bodies, act), value, *others))
        case _:
            return value


def _effects(bodies: Iterable[Jaxpr]) -> frozenset[Any]:
    eqns = (eqn for body in bodies for eqn in body.eqns)
    return frozenset[Any]().union(*(eqn.effects for eqn in eqns))


def every(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations and the equations inside their loops and calls."""
    for eqn in eqns:
        yield eqn
        for inner in _jax.inner_jaxprs(eqn):
            yield from every(inner.eqns)


def renamed(eqns: Iterable[JaxprEqn], names: Mapping[Var, Atom]) -> list[JaxprEqn]:
    """Returns the equations with each variable in `names` replaced by its atom."""

    def new(atom: Atom) -> Any:
        return names.get(atom, atom) if isinstance(atom, Var) else atom

    result = []
    for eqn in eqns:
        invars = list(map(new, eqn.invars))
        outvars = list(map(new, eqn.outvars))
        result.append(eqn.replace(invars=invars, outvars=outvars))
    return result


def defined(eqns: Iterable[JaxprEqn]) -> set[Var]:
    """Returns the variables that equations define."""
    return {v for eqn in eqns for v in eqn.outvars}


def free_variables(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """Returns the variables that equations read and do not define, in order of first reading."""
    defined: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        unmade = (var for var in variables(eqn.invars) if var not in defined)
        free |= dict.fromkeys(unmade)
        defined.update(eqn.outvars)
    return list(free)


def all_reads(eqns: Iterable[JaxprEqn], results: Iterable[Atom]) -> set[Var]:
    """Returns the variables that equations read and do not define, and the variables in results."""
    return {*free_variables(eqns), *variables(results)}
