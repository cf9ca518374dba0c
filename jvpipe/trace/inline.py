"""Replaces calls inside a jaxpr by their bodies, equation by equation, without tracing again."""

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
"""Calls that the compiler merges into their callers, each with the parameter that has its body."""

SHARDING = "sharding_constraint"
"""The primitive that is left out: it names a mesh, and the layer's stage may have another mesh."""


def inlined(closed: ClosedJaxpr, calls: Mapping[str, str]) -> ClosedJaxpr:
    """Returns a jaxpr with each call replaced by its body, pruned.

    Scalars that depend only on constants are computed. Sharding constraints are left out. An `iota`
    moves to where its result is first read. An equation of a body gets the source location of the
    outermost call around it, and the name scopes of all calls around it.

    Args:
        closed: any jaxpr.
        calls: the names of primitives that are calls, each with the parameter that has its body.

    >>> import jax, jax.numpy as jnp
    >>> nested = jax.make_jaxpr(lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + 1.0)(x))(2.0)
    >>> [str(eqn.primitive) for eqn in inlined(nested, JITS).jaxpr.eqns]
    ['sin', 'add']
    """
    line = _Line(calls)
    results = line.run(
        closed.jaxpr,
        closed.consts,
        closed.jaxpr.invars,
    )
    outvars = list(map(line.made, results))
    eqns = jaxprs.prune(line.eqns, outvars)
    read = dict.fromkeys((*jaxprs.free_variables(eqns), *jaxprs.variables(outvars)))
    constants = {var: line.constants[var] for var in read if var in line.constants}
    jaxpr = closed.jaxpr.replace(
        constvars=list(constants),
        eqns=eqns,
        outvars=outvars,
    )
    return ClosedJaxpr(jaxpr, list(constants.values()))


def merged_equations(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr with every call replaced by its body, also calls that the compiler keeps."""
    return inlined(closed, JITS | {"outlined": "jaxpr"})


@dataclass(eq=False)
class _Late:
    """An equation that is put off until its result is first read; `result` is None until then."""

    eqn: JaxprEqn
    atoms: "list[Atom | _Late]"
    call: Any
    result: Atom | None = None


class _Line:
    """The flat list of equations so far, and the constants that they read."""

    def __init__(self, calls: Mapping[str, str]) -> None:
        self.calls = calls
        self.eqns: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}
        self._variables: dict[int, Var] = {}  # the variable of each constant, by the constant's id

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Atom | _Late],
        call: Any = None,
    ) -> list[Atom | _Late]:
        """Appends the equations of a jaxpr and returns its results.

        Args:
            jaxpr: the whole jaxpr, or the body of a call in it.
            consts: the constants of the jaxpr.
            args: the arguments that it is called with.
            call: the source location of the call; None outside all calls.
        """
        constants = map(self._constant, map(_jax.aval, jaxpr.constvars), consts)
        env: dict[Var, Atom | _Late] = dict(zip(jaxpr.constvars, constants, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxprs.prune(jaxpr.eqns, jaxpr.outvars):
            atoms = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            env |= zip(eqn.outvars, self._results(eqn, atoms, call), strict=True)
        return [a if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]

    def made(self, value: Atom | _Late) -> Atom:
        """Returns a value that is read now; if its equation was put off, appends that equation."""
        if not isinstance(value, _Late):
            return value
        if value.result is None:
            atoms = list(map(self.made, value.atoms))
            (value.result,) = self._append(
                value.eqn,
                atoms,
                value.call,
            )
        return value.result

    def _results(
        self,
        eqn: JaxprEqn,
        values: list[Atom | _Late],
        call: Any,
    ) -> Sequence[Atom | _Late]:
        """Appends whatever replaces an equation, if anything does, and returns its results."""
        if eqn.primitive.name in self.calls:
            body = eqn.params[self.calls[eqn.primitive.name]]
            is_closed = isinstance(body, ClosedJaxpr)
            inner, consts = (body.jaxpr, body.consts) if is_closed else (body, ())
            return self.run(
                inner,
                consts,
                values,
                _jax.joined_source(call, eqn),
            )
        if is_late(eqn, any(isinstance(value, _Late) for value in values)):
            return [_Late(eqn, values, call)]
        atoms = [self._read(self.made(value)) for value in values]
        if eqn.primitive.name == SHARDING:
            return atoms
        constants = self._folded(eqn, atoms)
        if constants is not None:
            return constants
        # An index into many keys becomes an operand. So layers that differ only in that index can
        # share a program.
        if picks_key(eqn):
            keys = _jax.aval(eqn.invars[0])
            picking = jax.make_jaxpr(lambda keys: index_key(eqn, [keys]))(keys)
            source = _jax.joined_source(call, eqn)
            return self.run(picking.jaxpr, picking.consts, atoms, source)
        return self._append(eqn, atoms, call)

    def _append(
        self,
        eqn: JaxprEqn,
        atoms: list[Atom],
        call: Any,
    ) -> Sequence[Atom]:
        # New variables are needed, because several calls may have the same body.
        outvars = [_jax.new_variable(_jax.aval(v)) for v in eqn.outvars]
        source = _jax.joined_source(call, eqn)
        self.eqns.append(
            eqn.replace(
                invars=atoms,
                outvars=outvars,
                source_info=source,
            )
        )
        return outvars

    def _folded(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> list[Atom] | None:
        if not all(isinstance(a, Literal) or a in self.constants for a in atoms):
            return None
        values = [a.val if isinstance(a, Literal) else self.constants[a] for a in atoms]
        results = folded(eqn, values)
        if not results:
            return results
        pairs = zip(results, eqn.outvars, strict=True)
        return [Literal(x, _jax.aval(v)) for x, v in pairs]

    def _read(self, atom: Atom) -> Atom:
        """Returns an operand; a literal key becomes a constant: JAX allows no literal keys."""
        if not isinstance(atom, Literal):
            return atom
        if isinstance(_jax.aval(atom).dtype, np.dtype):
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
    """Computes an equation between constant scalars, such as a counter from which keys are derived.

    Args:
        eqn: the equation.
        values: its operands.

    Returns:
        The results; None if the equation has arrays or traced values, is not cheap, or has effects.
    """
    if eqn.effects or not is_cheap(eqn):
        return None
    if any(_jax.aval(v).shape for v in eqn.outvars):
        return None
    if any(isinstance(value, _jax.Tracer) for value in values):
        return None
    with jax.ensure_compile_time_eval():
        results = zip(_jax.bind(eqn, values), eqn.outvars, strict=True)
        return [literal(x, _jax.aval(v)) for x, v in results]


def literal(value: Any, aval: Any) -> Any:
    """Returns a constant as JAX's tracing writes it: a scalar as a NumPy scalar of its type."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return value if aval.shape or is_key else np.asarray(value, aval.dtype)[()]
