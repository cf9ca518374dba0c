"""Finds the running statistics of batch norms among the leaves of a model state.

A leaf r is a running statistic if the loss computes its new value r' as follows, where x are values
of n examples:

    s = sum(x)                   a statistic: a sum over the examples of a micro-batch
    y = x - s / n                the mean s / n centers examples, so s is a batch norm's statistic
    q = sum((x - s / n)**2)      the batch norm's other statistic, which may also be sum(x**2)
    r' = h(r, s, q)              the new value is made only of the old value and of such sums

The loss is traced at the shapes of a micro-batch and again at those of a whole batch, and both
traces must have the same equations. A value has examples along an axis if its shape differs between
the traces. `jvpipe.trace.deferred_state` adds up s and q over the micro-batches of a batch, and
computes r' from the totals. It uses the h of the second trace, which divides by the sizes of the
whole batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose, prod

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Literal, Var
from jvpipe.ir.layers import Ref
from jvpipe.ir.values import ValueKind
from jvpipe.trace.jaxprs import variables
from jvpipe.trace.loss import LossJaxpr
from jvpipe.trace.normalized import first_of_same

_CASTS = ("convert_element_type", "copy", "copy_p", "reduce_precision", "stop_gradient", "name")
"""Primitives whose results count as the same statistic as their operands."""
_SHAPING = (*_CASTS, "broadcast_in_dim", "reshape", "squeeze", "transpose")
"""Primitives that may come between a statistic and the single examples that read it."""


@dataclass(frozen=True)
class Sum:
    """A statistic of a micro-batch: a sum of values or of their squares.

    A place is the index of an equation in the loss.

    Attributes:
        eqn: the place of the equation that makes the sum.
        count: how many values are added up in each element of the sum.
        mean_of: if the sum is of squares of centered values, the place of the sum whose mean
            centers them. None for other sums, which can simply be added up over micro-batches.
    """

    eqn: int
    count: int
    mean_of: int | None = None


@dataclass(frozen=True)
class RunningLeaf:
    """A leaf of the model state that is a running statistic of a batch norm.

    Attributes:
        index: the leaf's index in the model state.
        sums: the sums that the new value is made of, and the sums whose means center the values in
            them.
        eqns: the places of the equations that make the new value from the sums.
    """

    index: int
    sums: tuple[Sum, ...]
    eqns: tuple[int, ...]


@dataclass(frozen=True)
class _MadeOf:
    """What a value is made of: sums over examples, inputs, and the equations in between."""

    sums: frozenset[int]
    inputs: frozenset[Var]
    eqns: frozenset[int]
    barrier: str | None = None
    """The operation, other than a sum, that makes the value from single examples; for messages."""


@dataclass(frozen=True)
class TwoTraces:
    """A loss at the shapes of a micro-batch and of a whole batch; both have the same equations.

    Attributes:
        micro: the loss at the shapes of a micro-batch.
        whole: the loss at the shapes of a whole batch.
    """

    micro: LossJaxpr
    whole: LossJaxpr

    @property
    def eqns(self) -> Sequence[JaxprEqn]:
        """The equations of a micro-batch."""
        return self.micro.eqns

    @cached_property
    def alike(self) -> bool:
        """Whether the two traces have the same primitives in the same order."""
        of_micro = [eqn.primitive.name for eqn in self.micro.eqns]
        of_whole = [eqn.primitive.name for eqn in self.whole.eqns]
        return of_micro == of_whole

    def find(self) -> list[RunningLeaf]:
        """Finds the leaves of the model state that are running statistics of batch norms.

        Raises:
            ValueError: there is no such leaf, or the update of a leaf cannot be deferred to the end
                of a batch; the message says why.
        """
        if not self.alike:
            raise ValueError(
                "deferred_batch_norm=True needs a loss with the same operations at every batch "
                "size, but this loss has other operations for a whole batch than for a "
                "micro-batch: leave it out, or call jvpipe.deferred_batch_norm in the loss"
            )
        found: list[RunningLeaf] = []
        others: list[str] = []
        for index, name in enumerate(self.micro.names[ValueKind.STATE]):
            leaf = self._leaf(index)
            if isinstance(leaf, RunningLeaf):
                found.append(leaf)
            elif leaf.startswith("!"):
                raise ValueError(
                    f"deferred_batch_norm=True: leaf '{name}' of the model state is made of a "
                    f"batch norm's statistics, but {leaf[1:]}; call jvpipe.deferred_batch_norm in "
                    "the loss, or leave the option out"
                )
            else:
                others.append(f"'{name}' {leaf}")
        if not found:
            more = "; ..." if len(others) > 4 else ""
            why = "; ".join(others[:4]) + more
            raise ValueError(
                "deferred_batch_norm=True, but no leaf of the model state is a running statistic "
                f"of a batch norm: {why}. Leave it out, or call jvpipe.deferred_batch_norm in the "
                "loss"
            )
        return found

    def _leaf(self, index: int) -> RunningLeaf | str:
        """Returns a leaf that is a running statistic; for any other leaf, a text that says why not.

        If the leaf is made of a batch norm's statistics, but its update cannot be deferred to the
        end of a batch, the text begins with "!", and `find` raises an error.
        """
        parts = self._made_of(state_after(self.micro, index))
        if not parts.sums and parts.barrier:
            return f"depends on single examples through {parts.barrier}"
        if not parts.sums:
            return "is not made of sums over examples"
        sums = [self._sum(eqn) for eqn in sorted(parts.sums)]
        known_sums = [x for x in sums if x is not None]
        if not known_sums:
            return "is made of sums over examples whose means do not center examples"
        if len(known_sums) < len(sums):
            return "!also of sums over examples other than those of values and of their squares"
        if parts.barrier:
            return f"!also of single examples through {parts.barrier}"
        if parts.inputs - {state_before(self.micro, index)}:
            return "!also of parameters, or of other leaves of the model state"
        # To center squares by the mean of a whole batch, the sum for this mean is needed, too.
        means = {x.mean_of for x in known_sums if x.mean_of is not None} - parts.sums
        known_sums += [Sum(place, self._count(self.eqns[place])) for place in sorted(means)]
        return RunningLeaf(
            index,
            tuple(known_sums),
            tuple(sorted(parts.eqns)),
        )

    # The values that have examples along an axis

    @cached_property
    def _whole_of(self) -> dict[Var, Atom]:
        """For each variable of the micro-batch's trace, the atom in the whole batch's trace."""
        whole_of: dict[Var, Atom] = {}
        whole_of |= zip(self.micro.inputs, self.whole.inputs, strict=True)
        for eqn, other in zip(self.eqns, self.whole.eqns, strict=True):
            whole_of |= zip(eqn.outvars, other.outvars, strict=True)
        return whole_of

    def _carries(self, atom: Atom) -> bool:
        """Tells whether a value has examples along an axis."""
        if not isinstance(atom, Var) or atom not in self._whole_of:
            return False
        return _jax.aval(atom).shape != _jax.aval(self._whole_of[atom]).shape

    @cached_property
    def _defining(self) -> dict[Var, int]:
        """The place of the equation that makes each variable."""
        places: dict[Var, int] = {}
        for i, eqn in enumerate(self.eqns):
            places |= dict.fromkeys(eqn.outvars, i)
        return places

    @cached_property
    def _first(self) -> dict[Var, Var]:
        return first_of_same(self.eqns)

    def _is_sum(self, eqn: JaxprEqn) -> bool:
        return eqn.primitive.name == "reduce_sum" and self._carries(eqn.invars[0])

    def _made_of(self, atom: Atom) -> _MadeOf:
        """Returns what a value is made of; the search ends at sums over examples and at inputs."""
        todo = variables([atom])
        seen = set[Var]()
        sums = set[int]()
        inputs = set[Var]()
        eqns = set[int]()
        barrier = None
        while todo:
            var = todo.pop()
            if var in seen:
                continue
            seen.add(var)
            place = self._defining.get(var)
            if self._carries(var):
                barrier = "a value of single examples"
            elif place is None:
                inputs.add(var)
            elif self._is_sum(self.eqns[place]):
                sums.add(place)
            elif any(map(self._carries, self.eqns[place].invars)):
                barrier = self.eqns[place].primitive.name
            else:
                eqns.add(place)
                todo += variables(self.eqns[place].invars)
        return _MadeOf(
            frozenset(sums),
            frozenset(inputs),
            frozenset(eqns),
            barrier,
        )

    # The statistics of batch norms

    def _origin(self, atom: Atom) -> Atom:
        """Returns a value before its casts; if several equations compute it, the first result."""
        while isinstance(atom, Var):
            atom = self._first.get(atom, atom)
            place = self._defining.get(atom)
            if place is None or self.eqns[place].primitive.name not in _CASTS:
                break
            atom = self.eqns[place].invars[0]
        return atom

    def _center(self, eqn: JaxprEqn) -> int | None:
        """Returns the place of the sum whose mean an equation subtracts from examples, or None."""
        if eqn.primitive.name != "sub" or not self._carries(eqn.outvars[0]):
            return None
        values, center = eqn.invars
        place = self._mean(center)
        if place is None:
            return None
        summed = self.eqns[place].invars[0]
        return place if self._origin(summed) is self._origin(values) else None

    def _mean(self, atom: Atom) -> int | None:
        """Returns the place of the sum of which a value is the mean; None if it is not a mean.

        The value may be a mean that is broadcast to the examples.
        """
        ratio = 1.0
        while (place := self._defining.get(atom) if isinstance(atom, Var) else None) is not None:
            eqn = self.eqns[place]
            if self._is_sum(eqn):
                return place if isclose(ratio * self._count(eqn), 1.0, rel_tol=1e-5) else None
            name, operands = eqn.primitive.name, eqn.invars
            if name in ("div", "mul") and isinstance(operands[1], Literal):
                factor = float(operands[1].val)
                ratio *= factor if name == "mul" else 1 / factor
            elif name not in _SHAPING:
                return None
            atom = operands[0]
        return None

    @staticmethod
    def _count(eqn: JaxprEqn) -> int:
        """Returns how many values each element of a sum adds up."""
        shape = _jax.aval(eqn.invars[0]).shape
        return prod(shape[axis] for axis in eqn.params["axes"])

    @cached_property
    def _centered(self) -> dict[int, int]:
        """The place of the mean's sum, by the place of the equation that subtracts the mean."""
        found = ((i, self._center(eqn)) for i, eqn in enumerate(self.eqns))
        return {i: place for i, place in found if place is not None}

    @cached_property
    def _centering(self) -> set[int]:
        """The places of the sums whose means center examples, and of sums equal to them."""

        def value(place: int) -> Atom:
            return self._origin(self.eqns[place].outvars[0])

        firsts = set(map(value, self._centered.values()))
        sums = (i for i, eqn in enumerate(self.eqns) if self._is_sum(eqn))
        return {i for i in sums if value(i) in firsts}

    def _sum(self, place: int) -> Sum | None:
        """Returns a batch norm's sum of values or of their squares; None for other sums."""
        eqn = self.eqns[place]
        axes = eqn.params["axes"]
        operand = self._origin(eqn.invars[0])
        count = self._count(eqn)
        if place in self._centering:
            return Sum(place, count)
        base = self._squared(operand)
        if base is None:
            return None
        centering = self._defining.get(base) if isinstance(base, Var) else None
        mean_of = None if centering is None else self._centered.get(centering)
        if mean_of is not None:
            alike = self.eqns[mean_of].params["axes"] == axes
            return Sum(place, count, mean_of) if alike else None
        # Squares that are not centered belong to a batch norm that also sums up the values.
        for center in map(self.eqns.__getitem__, self._centering):
            sums_base = self._origin(center.invars[0]) is base
            if sums_base and center.params["axes"] == axes:
                return Sum(place, count)
        return None

    def _squared(self, atom: Atom) -> Atom | None:
        """Returns the value x if `atom` is x**2; None if it is not a square."""
        place = self._defining.get(atom) if isinstance(atom, Var) else None
        if place is None:
            return None
        eqn = self.eqns[place]
        name = eqn.primitive.name
        operands = list(map(self._origin, eqn.invars))
        is_power = name == "integer_pow" and eqn.params["y"] == 2
        is_product = name == "mul" and operands[0] is operands[1]
        return operands[0] if name == "square" or is_power or is_product else None


def state_before(loss: LossJaxpr, index: int) -> Var:
    """Returns the input variable that has the old value of a leaf of the model state."""
    leaf = Ref(ValueKind.STATE, index)
    return next(var for var, ref in loss.inputs.items() if ref == leaf)


def state_after(loss: LossJaxpr, index: int) -> Atom:
    """Returns the new value of a leaf of the model state."""
    leaf = Ref(ValueKind.STATE, index)
    return next(atom for atom, ref in loss.outputs if ref == leaf)
