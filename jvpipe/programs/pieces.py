"""The pieces that an optimizer is cut into, and the slots that name the arrays between them.

In an update, layers and a global program take turns: all layers run, then the program combines what
they send, then the layers run again. One turn of each is a phase (`optimizer_pieces.py` has an
example). A piece is what one layer, or the global program, runs in one phase. A slot is the name of
an array that pieces read or write. Small values that a layer and the global program send each other
in a phase are packed into one vector per direction and dtype.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, JaxprEqn, Var
from jvpipe.programs.layer import program_key
from jvpipe.programs.transformations import scope_of
from jvpipe.trace import jaxprs
from jvpipe.trace.structure import comparable, structure


class SlotKind(StrEnum):
    """The kinds of arrays that pieces of an optimizer read and write, in argument order."""

    GRADIENT = "gradient"
    WEIGHT = "weight"
    PARAMETER = "parameter"
    STATE = "state"
    KEPT = "kept"
    PARTIAL = "partial"
    GLOBAL = "global"
    GRAD_NORM = "grad_norm"

    @property
    def order(self) -> int:
        """The position of the kind among all kinds.

        >>> SlotKind.WEIGHT.order
        1
        """
        return _ORDER[self]


_ORDER = {kind: i for i, kind in enumerate(SlotKind)}


@dataclass(frozen=True, slots=True)
class Slot:
    """The name of an array that a piece reads or writes.

    | kind | index | source | the array |
    |---|---|---|---|
    | gradient | leaf | reader | the sum over micro-batches of the gradients in reader `source` |
    | weight | | | the sum of the losses' weights, a scalar |
    | parameter, state | leaf | | a leaf of the parameters or of the optimizer's state |
    | kept | number | layer | a costly value that a layer needs again in a later phase |
    | partial | phase | layer | a vector of values that a layer sends the global program |
    | global | phase | | a vector of values that the global program sends the layers |
    | grad_norm | | | the norm of all gradients |

    `dtype` is the type of a partial or a global vector.
    """

    kind: SlotKind
    index: int = 0
    source: int = 0
    dtype: str = ""


@dataclass(frozen=True)
class Piece:
    """The program of one layer, or the global program, in one phase.

    Attributes:
        layer: the layer; None for the global program.
        phase: the phase in which it runs.
        reads: the arrays that it takes.
        writes: the arrays that it yields.
        donated: positions in `reads` of arrays that results may overwrite, because no later piece
            reads them.
        program: the jaxpr of the piece.
    """

    layer: int | None
    phase: int
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    donated: tuple[int, ...]
    program: ClosedJaxpr

    @cached_property
    def key(self) -> Hashable:
        """A value that is equal for pieces that can share one compiled program."""
        return _key_of(self.program), self.donated


@dataclass(frozen=True)
class Part:
    """The equations of a piece.

    Attributes:
        eqns: the equations, in their order.
        constants: the constants that the equations close over.
        vectors: for each slot of a vector, the values that are packed into it, in order.
        read: the slot of each value that the equations read.
        sent: the slots of the vectors that the piece yields.
        yielded: the other values that the piece yields, each with its slot.
    """

    eqns: Sequence[JaxprEqn]
    constants: Mapping[Var, Any]
    vectors: Mapping[Slot, Sequence[Var]]
    read: Mapping[Var, Slot]
    sent: Sequence[Slot]
    yielded: Sequence[tuple[Atom, Slot]]

    @cached_property
    def reads(self) -> tuple[Slot, ...]:
        """The arrays that the piece takes, each once."""
        slots = set(self.read.values())

        def place(slot: Slot) -> tuple[int, int, int, str]:
            return slot.kind.order, slot.index, slot.source, slot.dtype

        return tuple(sorted(slots, key=place))

    def piece(
        self,
        layer: int | None,
        phase: int,
        *,
        last: bool,
    ) -> Piece:
        """Returns the piece of these equations.

        Args:
            layer: the layer that runs the piece; None for the global program.
            phase: the phase in which the piece runs.
            last: whether the piece is the last of its layer; only then may it overwrite its inputs.
        """
        content = self._content
        if content not in _PROGRAMS:
            _PROGRAMS[content] = self._traced()
        program = _PROGRAMS[content]
        writes = (*self.sent, *(slot for _, slot in self.yielded))
        # Until its last piece, a layer may read any of its arrays again.
        donated = _donated(self.reads, writes, program) if last else ()
        return Piece(
            layer,
            phase,
            self.reads,
            writes,
            donated,
            program,
        )

    @property
    def _content(self) -> Hashable:
        """A value that is equal only for parts whose programs are equal up to variable names."""
        packed = [self.vectors[slot] for slot in self.sent]
        outputs: list[Atom] = [v for variables in packed for v in variables]
        outputs += [atom for atom, _ in self.yielded]
        read = [*jaxprs.free_variables(self.eqns), *jaxprs.variables(outputs)]
        constants = {v: self.constants[v] for v in read if v in self.constants}
        inputs = [*self.read, *constants]
        # By variable: its argument's number and, in a vector, its start and the vector's length.
        place = {slot: i for i, slot in enumerate(self.reads)}
        layout = []
        for var, slot in self.read.items():
            layout.append((place[slot], *self._span(slot, var)))
        return (
            structure(self.eqns, inputs, outputs, rules=False),
            tuple(map(comparable, constants.values())),
            tuple(layout),
            tuple(map(len, packed)),
        )

    def _traced(self) -> ClosedJaxpr:
        """Traces the program of the piece at the shapes of the arrays that it takes."""
        # A slot that is not a vector belongs to one variable, which has the shape of the array.
        single = {slot: var for var, slot in self.read.items()}
        shapes = []
        for slot in self.reads:
            if slot in self.vectors:
                shapes.append(self._vector(slot))
            else:
                shapes.append(jaxprs.shape_of(single[slot]))
        return jax.make_jaxpr(self._run)(*shapes)

    def _run(self, *arrays: jax.Array) -> list[Any]:
        """Runs the equations on the arrays of `reads`; returns the vectors, then other values."""
        array_of = dict(zip(self.reads, arrays, strict=True))
        env = {**self.constants}
        for var, slot in self.read.items():
            array = array_of[slot]
            if slot in self.vectors:
                array = self._unpack(array, slot, var)
            env[var] = array
        # The name scopes are kept, because profiles and messages show transformations by scope.
        jaxprs.run_jaxpr(self.eqns, env, _bind_in_scope)
        packed = []
        for slot in self.sent:
            values = jaxprs.read_by(self.vectors[slot], env)
            packed.append(_packed(values))
        results = jaxprs.read_by([atom for atom, _ in self.yielded], env)
        return packed + list(map(_strong, results))

    def _vector(self, slot: Slot) -> jax.ShapeDtypeStruct:
        """Returns the shape and type of a vector."""
        variables = self.vectors[slot]
        length = sum(map(jaxprs.size_of, variables))
        return jax.ShapeDtypeStruct((length,), _jax.aval(variables[0]).dtype)

    def _unpack(
        self,
        vector: jax.Array,
        slot: Slot,
        var: Var,
    ) -> jax.Array:
        """Returns a value from the vector into which it was packed."""
        start, _ = self._span(slot, var)
        flat = jax.lax.slice(
            vector,
            [start],
            [start + jaxprs.size_of(var)],
        )
        return jax.lax.reshape(flat, _jax.aval(var).shape)

    def _span(self, slot: Slot, var: Var) -> tuple[int, ...]:
        """Returns the start of a value in its vector, and the length of the vector.

        Returns () if the slot is not a vector.
        """
        if slot not in self.vectors:
            return ()
        sizes = {v: jaxprs.size_of(v) for v in self.vectors[slot]}
        before = itertools.takewhile(lambda v: v is not var, sizes)
        return sum(sizes[v] for v in before), sum(sizes.values())


_PROGRAMS: dict[Hashable, ClosedJaxpr] = {}
"""The traced programs, by the content of their parts (`Part._content`)."""


@cache
def _key_of(program: ClosedJaxpr) -> Hashable:
    return program_key(program)


def _donated(
    reads: Sequence[Slot],
    writes: Sequence[Slot],
    program: ClosedJaxpr,
) -> tuple[int, ...]:
    """Returns the positions of the arrays that results can overwrite.

    An array is donated only if a result of its shape and type is left to overwrite it, because JAX
    warns about donated arrays that no result overwrites. Gradients are donated only after
    parameters and state that the piece also writes.
    """
    results = Counter((aval.shape, aval.dtype) for aval in program.out_avals)
    again, sums = [], []
    for i, slot in enumerate(reads):
        is_lasting = slot.kind in (SlotKind.PARAMETER, SlotKind.STATE)
        if is_lasting and slot in writes:
            again.append(i)
        elif slot.kind is SlotKind.GRADIENT:
            sums.append(i)
    donated = []
    for i in (*again, *sums):
        aval = program.in_avals[i]
        if results[aval.shape, aval.dtype]:
            results[aval.shape, aval.dtype] -= 1
            donated.append(i)
    return tuple(sorted(donated))


def _packed(values: Sequence[jax.Array]) -> jax.Array:
    flat = [jax.lax.reshape(x, (x.size,)) for x in values]
    return jax.lax.concatenate(flat, 0)


def _bind_in_scope(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    with jax.named_scope(scope_of(eqn)):
        return _jax.bind(eqn, values)


def _strong(value: Any) -> jax.Array:
    """Returns a value without a weak type, because a weak type makes JAX recompile its readers."""
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    if not jax.typeof(array).weak_type:
        return array
    return jax.lax.convert_element_type(array, array.dtype)
