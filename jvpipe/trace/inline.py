"""Calls inside a jaxpr replaced by their bodies, equation by equation: nothing is traced again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.trace import jaxprs
from jvpipe.trace.keys import index_key, picks_key
from jvpipe.trace.primitives import is_cheap
from jvpipe.trace.unroll import is_late

JITS = {"jit": "jaxpr", "pjit": "jaxpr"}
"""The calls that the compiler merges into their callers, and the parameter that has their body."""

SHARDING = "sharding_constraint"
"""What is said of shardings: it names a mesh that may not be that of the layer's stage, and is left out."""


def inlined(closed: ClosedJaxpr, calls: Mapping[str, str]) -> ClosedJaxpr:
    """Makes the same with the bodies of calls in their places, pruned.

    What depends on scalar constants alone is computed, what is said of shardings left out; numbers along an axis are
    made where they are read first. An equation of a body has the source of its outermost call, and the name scopes of
    all.

    Args:
        closed: any jaxpr.
        calls: the names of equations that are calls, and the parameter that has the body of each.

    >>> import jax, jax.numpy as jnp
    >>> nested = jax.make_jaxpr(lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + 1.0)(x))(2.0)
    >>> [str(eqn.primitive) for eqn in inlined(nested, JITS).jaxpr.eqns]
    ['sin', 'add']
    """
    line = _Line(calls)
    outvars = [line.made(a) for a in line.run(closed.jaxpr, closed.consts, closed.jaxpr.invars)]
    eqns = jaxprs.prune(line.eqns, outvars)
    read = dict.fromkeys((*jaxprs.free_variables(eqns), *jaxprs.variables(outvars)))
    constants = {var: line.constants[var] for var in read if var in line.constants}
    jaxpr = closed.jaxpr.replace(constvars=list(constants), eqns=eqns, outvars=outvars)
    return ClosedJaxpr(jaxpr, list(constants.values()))


def merged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Makes the same with the bodies of calls in their places, also of those that the compiler leaves apart."""
    return inlined(closed, JITS | {"outlined": "jaxpr"})


@dataclass(eq=False)
class _Late:
    """An equation that stands where its result is read first; then `result` is there."""

    eqn: JaxprEqn
    atoms: "list[Atom | _Late]"
    call: Any
    result: Atom | None = None


class _Line:
    """The equations so far, and the constants that they read."""

    def __init__(self, calls: Mapping[str, str]) -> None:
        self.calls = calls
        self.eqns: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}
        self._variables: dict[int, Var] = {}  # of constants, by identity

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Atom | _Late], call: Any = None
    ) -> list[Atom | _Late]:
        """Appends the equations of a jaxpr, inside a call or outside all; returns its results.

        Args:
            jaxpr: whose equations they are.
            consts: its constants.
            args: what it is called with.
            call: the source of the call.
        """
        env: dict[Var, Atom | _Late] = dict(
            zip(
                jaxpr.constvars,
                map(self._constant, map(_jax.aval, jaxpr.constvars), consts),
                strict=True,
            )
        )
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxprs.prune(jaxpr.eqns, jaxpr.outvars):
            atoms = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            env |= zip(eqn.outvars, self._results(eqn, atoms, call), strict=True)
        return [a if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]

    def made(self, value: Atom | _Late) -> Atom:
        """A value that is read now."""
        if not isinstance(value, _Late):
            return value
        if value.result is None:
            (value.result,) = self._append(value.eqn, list(map(self.made, value.atoms)), value.call)
        return value.result

    def _results(
        self, eqn: JaxprEqn, values: list[Atom | _Late], call: Any
    ) -> Sequence[Atom | _Late]:
        if eqn.primitive.name in self.calls:
            body = eqn.params[self.calls[eqn.primitive.name]]
            inner, consts = (
                (body.jaxpr, body.consts) if isinstance(body, ClosedJaxpr) else (body, ())
            )
            return self.run(inner, consts, values, _jax.joined_source(call, eqn))
        if is_late(eqn, any(isinstance(value, _Late) for value in values)):
            return [_Late(eqn, values, call)]
        atoms = [self._read(self.made(value)) for value in values]
        if eqn.primitive.name == SHARDING:
            return atoms
        if (known := self._folded(eqn, atoms)) is not None:
            return known
        if picks_key(eqn):
            picking = jax.make_jaxpr(lambda keys: index_key(eqn, [keys]))(_jax.aval(eqn.invars[0]))
            return self.run(picking.jaxpr, picking.consts, atoms, _jax.joined_source(call, eqn))
        return self._append(eqn, atoms, call)

    def _append(self, eqn: JaxprEqn, atoms: list[Atom], call: Any) -> Sequence[Atom]:
        outvars = [
            _jax.new_variable(_jax.aval(v)) for v in eqn.outvars
        ]  # the body may be that of another call, too
        self.eqns.append(
            eqn.replace(invars=atoms, outvars=outvars, source_info=_jax.joined_source(call, eqn))
        )
        return outvars

    def _folded(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> list[Atom] | None:
        if not all(isinstance(a, Literal) or a in self.constants for a in atoms):
            return None
        results = folded(
            eqn, [a.val if isinstance(a, Literal) else self.constants[a] for a in atoms]
        )
        return results and [
            Literal(x, _jax.aval(v)) for x, v in zip(results, eqn.outvars, strict=True)
        ]

    def _read(self, atom: Atom) -> Atom:
        """What an equation reads; a key is no literal."""
        if not isinstance(atom, Literal) or isinstance(_jax.aval(atom).dtype, np.dtype):
            return atom
        return self._constant(_jax.aval(atom), atom.val)

    def _constant(self, aval: Any, value: Any) -> Atom:
        if not aval.shape and isinstance(aval.dtype, np.dtype):
            return Literal(literal(value, aval), aval)
        if id(value) not in self._variables:
            self._variables[id(value)] = _jax.new_variable(aval)
        self.constants[self._variables[id(value)]] = value
        return self._variables[id(value)]


def folded(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """The results of an equation between constant scalars, such as the counter of a stream of keys."""
    scalar = all(_jax.aval(v).shape == () for v in eqn.outvars)
    if (
        eqn.effects
        or not scalar
        or any(isinstance(v, _jax.Tracer) for v in values)
        or not is_cheap(eqn)
    ):
        return None
    with jax.ensure_compile_time_eval():
        return [
            literal(x, _jax.aval(v))
            for x, v in zip(_jax.bind(eqn, values), eqn.outvars, strict=True)
        ]


def literal(value: Any, aval: Any) -> Any:
    """A scalar constant, perhaps a number of Python, in the form that tracing writes into the jaxpr itself."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return value if aval.shape or is_key else np.asarray(value, aval.dtype)[()]
