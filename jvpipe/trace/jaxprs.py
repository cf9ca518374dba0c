"""Jaxprs as lists of equations: flatten, run, prune, compare."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.trace.keys import index_key
from jvpipe.trace.primitives import is_cheap
from jvpipe.trace.unroll import stacked, unrolled, whole

# Calls that say nothing of their own: their bodies belong to the caller. `remat2` is among them because
# jvpipe decides by itself what is kept and what is recomputed.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
}
# Calls with a derivative of their own.
_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
DEBUGGING = ("debug_callback", "debug_print")


def flatten(fn: Callable[..., Any], *args: Any, keep_rules: bool = False) -> ClosedJaxpr:
    """Traces `fn` to one flat, pruned jaxpr; `args` are arrays or `jax.ShapeDtypeStruct`.

    Nested `jit` and `jax.checkpoint` calls are inlined and keep their name scopes; what depends on constants
    alone is computed at once. Functions with a derivative of their own are inlined too, unless the result is still
    to be differentiated (`keep_rules`). What is said of shardings is left out.

    >>> import jax, jax.numpy as jnp
    >>> closed = flatten(jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1.0), 1.0)
    >>> [str(eqn.primitive) for eqn in closed.jaxpr.eqns]
    ['sin', 'add']
    """
    calls = _CALLS if keep_rules else _CALLS | _RULES
    traced = jax.make_jaxpr(fn)(*args)
    if any(isinstance(x, _jax.Tracer) for x in traced.consts):
        raise ValueError(
            "the loss, or a derivative rule in it, closes over a value that was traced, of which nothing is left when "
            "it is used (jax.grad(jax.jit(loss)) fails likewise): pass the value as an argument, or make it with NumPy"
        )
    closed = jax.make_jaxpr(lambda *xs: [*map(whole, _inlined(traced.jaxpr, traced.consts, xs, calls))])(
        *traced.in_avals
    )
    jaxpr = closed.jaxpr
    return ClosedJaxpr(jaxpr.replace(eqns=prune(jaxpr.eqns, jaxpr.outvars)), closed.consts)


def _inlined(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], calls: dict[str, str]) -> list[Any]:
    def inline(body: ClosedJaxpr | Jaxpr, values: Sequence[Any]) -> list[Any]:
        inner, inner_consts = (body.jaxpr, body.consts) if isinstance(body, ClosedJaxpr) else (body, ())
        return _inlined(inner, inner_consts, values, calls)

    def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        with jax.named_scope(_jax.scope(eqn)):
            if (result := stacked(eqn, values)) is not None:
                return result
            if eqn.primitive.name in calls:
                return inline(eqn.params[calls[eqn.primitive.name]], values)
            if (results := unrolled(eqn, values, lambda xs: inline(eqn.params["jaxpr"], xs))) is not None:
                return results
            values = [whole(v) for v in values]
            if eqn.primitive.name == "sharding_constraint":  # of a mesh that may not be that of the layer's stage
                return values
            return folded(eqn, values) or index_key(eqn, values) or _jax.bind(eqn, values)

    env = dict(
        zip(
            [*jaxpr.constvars, *jaxpr.invars],
            [*map(_literal, consts, map(_jax.aval, jaxpr.constvars)), *args],
            strict=True,
        )
    )
    run(prune(jaxpr.eqns, jaxpr.outvars), env, apply)
    return read(jaxpr.outvars, env)


def folded(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """The results of an equation between constant scalars, such as the counter of a stream of keys."""
    scalar = all(_jax.aval(v).shape == () for v in eqn.outvars)
    if eqn.effects or not scalar or any(isinstance(v, _jax.Tracer) for v in values) or not is_cheap(eqn):
        return None
    with jax.ensure_compile_time_eval():
        return [_literal(x, _jax.aval(v)) for x, v in zip(_jax.bind(eqn, values), eqn.outvars, strict=True)]


def _literal(value: Any, aval: Any) -> Any:
    """A scalar constant, perhaps a number of Python, in the form that tracing writes into the jaxpr itself."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return value if aval.shape or is_key else np.asarray(value, aval.dtype)[()]


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

    >>> def loud(x):
    ...     jax.debug.print("{}", x)
    ...     return x + 1.0
    >>> [str(eqn.primitive) for eqn in silent(jax.make_jaxpr(loud)(1.0)).jaxpr.eqns]
    ['add']
    """
    effects = {effect for eqn in every(closed.jaxpr) if eqn.primitive.name in DEBUGGING for effect in eqn.effects}
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


def every(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr, also those inside of loops and calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _jax.inner_jaxprs(eqn):
            yield from every(inner)


def free_variables(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations read and do not define, in the order of their first reading."""
    defined: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        free.update((var, None) for var in variables(eqn.invars) if var not in defined)
        defined.update(eqn.outvars)
    return list(free)


class Structure:
    """A hashable value that remembers its hash."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Structure({self._value!r})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self._hash == other._hash and self._value == other._value


def structure(
    eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Atom], *, rules: bool = True
) -> Structure:
    """A value that is equal for two runs of equations which compute the same function in the same way.

    Variables are numbered in order of appearance. A custom derivative is compared by what its rule computes, unless
    the equations are not to be differentiated and `rules` do not count. Parameters that cannot be compared do so by
    identity: equal structures are equal programs; the converse need not hold.

    Args:
        eqns: in order.
        inputs: their free variables, in order.
        outputs: their results, in order.
        rules: compare derivative rules too.
    """
    numbers: dict[Var, int] = {}

    def number(var: Var) -> Hashable:  # the number says which variable, its first appearance also what it is
        if var in numbers:
            return numbers[var]
        numbers[var] = len(numbers)
        return numbers[var], _kind(var)

    def atom(a: Atom) -> Any:
        return ("literal", _kind(a), comparable(a.val)) if isinstance(a, Literal) else number(a)

    head = tuple(number(v) for v in inputs)
    body = tuple(
        (
            eqn.primitive.name,
            tuple(atom(a) for a in eqn.invars),
            _comparable_params(eqn, rules),
            tuple(number(v) for v in eqn.outvars),
        )
        for eqn in eqns
    )
    return Structure((head, body, tuple(atom(a) for a in outputs)))


def _kind(atom: Atom) -> Hashable:
    aval = atom.aval
    known = getattr(aval, "shape", None), getattr(aval, "dtype", None), getattr(aval, "weak_type", False)
    return str(aval) if None in known else known


def _comparable_params(eqn: JaxprEqn, rules: bool) -> Hashable:
    if eqn.primitive.name in _RULES and not rules:
        return comparable(eqn.params["call_jaxpr"], rules=False)
    if eqn.primitive.name in _RULES and not eqn.params["symbolic_zeros"]:
        return comparable(eqn.params["call_jaxpr"]), comparable(_pullback(eqn), rules=False)
    return tuple(sorted((k, comparable(v, rules=rules)) for k, v in eqn.params.items()))


def _pullback(eqn: JaxprEqn) -> ClosedJaxpr:
    """The derivative of an equation, a function of its operands and of the cotangents of its results.

    Arrays that a rule closes over are its first operands and have no derivative, but nothing says how many these are.
    """
    ins, outs = [_jax.aval(a) for a in eqn.invars], [_jax.aval(a) for a in eqn.outvars]

    def inexact(values: Sequence[Any]) -> list[int]:
        return [i for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.inexact)]

    def derivative(moving: Sequence[int]) -> ClosedJaxpr:
        def pull(operands: list[Any], cotangents: list[Any]) -> Any:
            def apply(*moved: Any) -> list[Any]:
                values = dict(enumerate(operands)) | dict(zip(moving, moved, strict=True))
                out = _jax.bind(eqn, list(values.values()))
                return [out[i] for i in inexact(out)]

            return jax.vjp(apply, *(operands[i] for i in moving))[1](cotangents)

        return flatten(pull, ins, [outs[i] for i in inexact(outs)])

    moving = inexact(ins)
    while True:
        try:
            return derivative(moving)
        except Exception as error:
            if not _jax.is_of_closed_over(error) or not moving:
                raise
            moving = moving[1:]


class _Identity:
    """Wraps an incomparable value; equal to itself alone. Holds it, so that its id is not given again."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __lt__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return repr(self.value)


def comparable(value: Any, *, rules: bool = True) -> Any:
    """A hashable stand-in for a parameter or constant of a jaxpr; custom derivatives count if `rules` do."""
    if isinstance(value, ClosedJaxpr):
        consts = tuple(comparable(c) for c in value.consts)
        return ("jaxpr", structure(value.jaxpr.eqns, value.jaxpr.invars, value.jaxpr.outvars, rules=rules), consts)
    if isinstance(value, Jaxpr):
        return ("jaxpr", structure(value.eqns, [*value.constvars, *value.invars], value.outvars, rules=rules))
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(value.dtype), comparable(jax.random.key_data(value)))
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        return ("array", array.shape, str(array.dtype), array.tobytes())
    if isinstance(value, (tuple, list)):
        return tuple(comparable(v, rules=rules) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((str(k), comparable(v, rules=rules)) for k, v in value.items()))
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, (str, bytes, int, complex, bool, type(None), Collection)) and _hashable(value):
        return (type(value).__name__, value)
    if _hashable(value) and type(value).__eq__ is not object.__eq__ and not callable(value):
        return value
    return _Identity(value)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
