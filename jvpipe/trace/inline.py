"""Replaces calls inside a jaxpr by their bodies, equation by equation, without tracing again.

Scans over stacked layers are unrolled as well, so that the loss can be cut between layers. An array
whose slices are available one by one is represented by a `_Stack`. A scan over layers takes slices
from stacks, and a cast of a stack is a stack. The whole array is made only if any other equation
reads the stack.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.trace import jaxprs
from jvpipe.trace.keys import index_key, is_key, picks_key, take
from jvpipe.trace.primitives import is_cheap

JITS = {"jit": "jaxpr", "pjit": "jaxpr"}
"""Calls that the compiler inlines: primitive names, each with the parameter that has the body."""
SLICEWISE = ("convert_element_type", "copy", "stop_gradient")
"""Primitives that act on each slice of a stack as they act on the whole stack."""
_SHARDING = "sharding_constraint"
"""The primitive that is removed: it names a mesh, and the layer's stage may have another mesh."""


@jax.jit
def jvpipe_stack_layers(*slices: Any) -> jax.Array:
    """Stacks arrays along a new first axis; inlining recognizes this function by its name."""
    return jax.numpy.stack(slices)


def inlined(closed: ClosedJaxpr, calls: Mapping[str, str]) -> ClosedJaxpr:
    """Returns a pruned jaxpr in which the bodies of calls replace the calls.

    Scans over stacks that `jvpipe_stack_layers` made are unrolled. Scalars that depend only on
    constants are computed. Sharding constraints are removed. An `iota` moves to the first equation
    that reads its result. An equation of a body gets the source location of the outermost call
    around it, and the name scopes of all calls around it.

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
    outvars = list(map(_made, results))
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
    """Returns a jaxpr with every call replaced by its body, even calls that the compiler keeps."""
    return inlined(closed, JITS | {"outlined": "jaxpr"})


@dataclass(eq=False)
class _Stack:
    """An array whose slices are available one by one.

    Attributes:
        part: returns the slice at an index.
        whole: returns the array; the first call appends the equations that make it.
        layers: whether the slices belong to layers; a scan over such a stack is unrolled.
    """

    part: "Callable[[int], _Value]"
    whole: Callable[[], Atom]
    layers: bool = False


_Value = Atom | _Stack


def _made(value: _Value) -> Atom:
    """Returns a value as one atom; for a stack, the whole array."""
    return value.whole() if isinstance(value, _Stack) else value


class _Line:
    """The flat list of equations so far, and the constants that they read.

    Methods have two kinds of source locations: `call` is that of the call around an equation (None
    outside all calls), and `source` is the location that new equations get.
    """

    def __init__(self, calls: Mapping[str, str]) -> None:
        self.calls = calls
        self.eqns: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}
        self._variables: dict[int, Var] = {}  # the variable of each constant, by the constant's id

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[_Value],
        call: Any = None,
    ) -> list[_Value]:
        """Appends the equations of a jaxpr and returns its results.

        Args:
            jaxpr: the whole jaxpr, or the body of a call or loop in it.
            consts: the constants of `jaxpr`.
            args: its arguments.
            call: the source location of the call; None outside all calls.
        """
        constants = map(self._constant, map(_jax.aval, jaxpr.constvars), consts)
        env: dict[Var, _Value] = dict(zip(jaxpr.constvars, constants, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxprs.prune(jaxpr.eqns, jaxpr.outvars):
            values = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            env |= zip(eqn.outvars, self._results(eqn, values, call), strict=True)
        return [a if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]

    def _results(
        self,
        eqn: JaxprEqn,
        values: list[_Value],
        call: Any,
    ) -> Sequence[_Value]:
        """Appends an equation, or what replaces it, and returns the results of the equation."""
        name = eqn.primitive.name
        stack = self._stack(eqn, values, call)
        if stack is not None:
            return [stack]
        if name in self.calls:
            body = eqn.params[self.calls[name]]
            is_closed = isinstance(body, ClosedJaxpr)
            inner, consts = (body.jaxpr, body.consts) if is_closed else (body, ())
            return self.run(inner, consts, values, _jax.joined_source(call, eqn))
        if name == "scan":
            constants, carry, xs = _jax.scan_operands(eqn, values)
            if any(isinstance(x, _Stack) and x.layers for x in xs):
                source = _jax.joined_source(call, eqn)
                return self._unrolled(eqn, constants, carry, xs, source)
        return self._applied(eqn, list(map(_made, values)), call)

    def _applied(
        self,
        eqn: JaxprEqn,
        values: Sequence[Atom],
        call: Any,
    ) -> Sequence[_Value]:
        """Appends an equation, unless its results are known without it."""
        atoms = list(map(self._read, values))
        if eqn.primitive.name == _SHARDING:
            return atoms
        constants = self._folded(eqn, atoms)
        if constants is not None:
            return constants
        # An index into many keys becomes an operand, so that layers that differ only in that index
        # can share a program.
        if picks_key(eqn):
            source = _jax.joined_source(call, eqn)
            return [self._traced(lambda keys: index_key(eqn, keys), atoms, source)]
        return self._append(eqn, atoms, call)

    def _traced(
        self,
        fn: Callable[..., Any],
        atoms: Sequence[Atom],
        source: Any,
    ) -> Atom:
        """Appends the equations of a function with one result, and returns that result."""
        traced = jax.make_jaxpr(fn)(*map(_jax.aval, atoms))
        (result,) = self.run(traced.jaxpr, traced.consts, atoms, source)
        return _made(result)

    def _stack(
        self,
        eqn: JaxprEqn,
        values: Sequence[_Value],
        call: Any,
    ) -> _Stack | None:
        """Returns the result of an equation as a stack; None if the equation makes no stack.

        Args:
            eqn: the equation.
            values: its operands.
            call: the source location of the call around it.
        """
        name, params = eqn.primitive.name, eqn.params
        if name in JITS and params["name"] == "jvpipe_stack_layers":
            return self._stack_of(values, _jax.joined_source(call, eqn), layers=True)
        # The elements of a one-dimensional iota, such as the layers' numbers, are constants.
        if name == "iota" and len(params["shape"]) == 1:
            number = _jax.aval(eqn.outvars[0]).update(shape=())
            array = cache(lambda: self._append(eqn, [], call)[0])
            return _Stack(lambda i: Literal(_literal(i, number), number), array)
        stack = values[0] if name in SLICEWISE else None
        if not isinstance(stack, _Stack):
            return None

        def part(i: int) -> _Value:
            operand = _made(stack.part(i))
            result = _jax.reshaped_variable(eqn.outvars[0], _jax.aval(operand).shape)
            return self._applied(eqn.replace(outvars=[result]), [operand], call)[0]

        array = cache(lambda: self._append(eqn, [stack.whole()], call)[0])
        return _Stack(part, array, stack.layers)

    def _stack_of(
        self,
        parts: Sequence[_Value],
        source: Any,
        *,
        layers: bool = False,
    ) -> _Stack:
        def array() -> Atom:
            atoms = list(map(_made, parts))
            return self._traced(lambda *slices: jax.numpy.stack(slices), atoms, source)

        return _Stack(parts.__getitem__, cache(array), layers)

    def _unrolled(
        self,
        eqn: JaxprEqn,
        constants: Sequence[_Value],
        carry: Sequence[_Value],
        xs: Sequence[_Value],
        source: Any,
    ) -> list[_Value]:
        """Appends the iterations of a scan over layers, and returns the results of the scan.

        Args:
            eqn: the scan.
            constants: the values that all iterations read.
            carry: the initial carry.
            xs: the arrays or stacks; each iteration reads one slice of each.
            source: the location that new equations get.
        """
        body, rows = eqn.params["jaxpr"], range(eqn.params["length"])
        ys: dict[int, list[_Value]] = {}
        # A reversed scan runs from the last slice to the first, but its stacked results,
        # the ys, are in the order of the slices.
        for i in reversed(rows) if eqn.params["reverse"] else rows:
            row = [self._part(x, i, source) for x in xs]
            args = [*constants, *carry, *row]
            out = self.run(body.jaxpr, body.consts, args, source)
            ys[i] = out[len(carry) :]
            carry = out[: len(carry)]
        columns = zip(*(ys[i] for i in rows), strict=True)
        return [*carry, *(self._stack_of(column, source) for column in columns)]

    def _part(self, x: _Value, i: int, source: Any) -> _Value:
        """Returns the slice of a scanned array or stack that iteration `i` reads."""
        if isinstance(x, _Stack):
            return x.part(i)

        def slice_of(x: Any) -> Any:
            if not is_key(x):
                return jax.lax.index_in_dim(x, i, keepdims=False)
            starts = (i, *[0] * (x.ndim - 1))
            sizes = (1, *x.shape[1:])
            return jax.lax.squeeze(take(x, starts, sizes), (0,))

        return self._traced(slice_of, [x], source)

    def _append(
        self,
        eqn: JaxprEqn,
        atoms: list[Atom],
        call: Any,
    ) -> Sequence[Atom]:
        # Several calls may have the same body, so each copy of it needs new variables.
        outvars = [_jax.new_variable(_jax.aval(v)) for v in eqn.outvars]
        source = _jax.joined_source(call, eqn)
        new = eqn.replace(invars=atoms, outvars=outvars, source_info=source)
        self.eqns.append(_on_any_devices(new))
        return outvars

    def _folded(self, eqn: JaxprEqn, atoms: Sequence[Atom]) -> list[Atom] | None:
        """Computes an equation between constant scalars, such as counters that keys derive from.

        Returns:
            The results; None if the equation has an array as its result, reads a value that is not
            constant, is not cheap, or has effects.
        """
        makes_array = any(_jax.aval(v).shape for v in eqn.outvars)
        if eqn.effects or makes_array or not is_cheap(eqn):
            return None
        if not all(isinstance(a, Literal) or a in self.constants for a in atoms):
            return None
        values = jaxprs.read_by(atoms, self.constants)
        avals = map(_jax.aval, eqn.outvars)
        with jax.ensure_compile_time_eval():
            results = zip(_jax.bind(eqn, values), avals, strict=True)
            return [Literal(_literal(x, aval), aval) for x, aval in results]

    def _read(self, atom: Atom) -> Atom:
        """Returns an operand; a key becomes a constant, because JAX allows no literal keys."""
        if isinstance(atom, Literal) and is_key(_jax.aval(atom)):
            return self._constant(_jax.aval(atom), atom.val)
        return atom

    def _constant(self, aval: Any, value: Any) -> Atom:
        if not aval.shape and not is_key(aval):
            return Literal(_literal(value, aval), aval)
        if id(value) not in self._variables:
            self._variables[id(value)] = _jax.new_variable(aval)
        variable = self._variables[id(value)]
        self.constants[variable] = value
        return variable


def _on_any_devices(eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation in which each `jax.shard_map` names axes, but no devices.

    The devices are those of the loss's mesh, and the layer's stage may have others.
    """

    def body(jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=list(map(_on_any_devices, jaxpr.eqns)))

    if not _jax.inner_jaxprs(eqn):
        return eqn
    params = {name: jaxprs.with_bodies(body, value) for name, value in eqn.params.items()}
    if eqn.primitive.name == "shard_map":
        params["mesh"] = params["mesh"].abstract_mesh
    return eqn.replace(params=params)


def _literal(value: Any, aval: Any) -> Any:
    """Returns a constant in the form that JAX's tracing uses: a scalar as a NumPy scalar."""
    return value if aval.shape or is_key(aval) else np.asarray(value, aval.dtype)[()]
