"""Finds how each value of a loss depends on a micro-batch's examples, by tracing at two sizes.

A slice is the part of a micro-batch that one replica of a stage computes. Each line below has a
value of the loss at 4 and at 2 examples, and says how the value depends on the examples:

    on 4 examples    on 2 examples    dependence
    x[4, 8]          x[2, 8]          along axis 0: this axis has a part for each example
    x @ w            x @ w            along axis 0, like x
    sum(x)           sum(x)           a sum: the slices' sums add up to it
    sum(x) / 4       sum(x) / 2       a mean
    max(x)           max(x)           mixed: jvpipe does not compute it from the slices' values

Sums, means and mixed values may be used in the loss and in aux (`jvpipe.trace.slices` checks the
results). A value of a single example must not depend on them, because it would then have another
value on a slice. The exception is a batch norm whose statistics the model state keeps: each replica
normalizes by the statistics of its own examples (`jvpipe.trace.normalized`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from jvpipe import _jax
from jvpipe._jax import Atom, Jaxpr, JaxprEqn, Literal, Var
from jvpipe.ir.examples import Over
from jvpipe.trace import jaxprs
from jvpipe.trace.alike import Alike
from jvpipe.trace.axes import along_after, grown_axis
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.factors import factor_power
from jvpipe.trace.flatten import CALLS, RULES
from jvpipe.trace.loops import LOOPS
from jvpipe.trace.normalized import normalized
from jvpipe.trace.pullbacks import pullback
from jvpipe.trace.rules import cotangent, fits
from jvpipe.trace.structure import comparable
from jvpipe.trace.sums_and_means import (
    NONE,
    ZERO,
    Beside,
    Lies,
    counted,
    guarded,
    makes_zero,
    open_of,
    power_after,
    reduced,
    summed_axes,
)

GENERATORS = ("random_bits", "random_split", "iota")
"""Primitives whose results depend on positions: a slice cuts its part out of the whole."""
_POSITIONS = ("start_indices", "padding_config")
_GIVES = "gives single examples a value that was made of several examples"
_IN_FIRST = {
    Beside.LEFT: Beside.FIRST_LEFT,
    Beside.RIGHT: Beside.FIRST_RIGHT,
    Beside.FIRST_LEFT: Beside.FIRST_LEFT,
    Beside.FIRST_RIGHT: Beside.FIRST_RIGHT,
}
"""For values that model state depends on: if a sum is added to an operand that depends on no
example, only the first slice adds the operand, so that counters stay exact.
"""


@dataclass
class Spreading:
    """The walk over the equations of a loss, traced at two numbers of examples.

    Args:
        examples: the number of examples of the loss whose equations are followed.
        fewer: the number of examples in the other trace. It is smaller if a slice is compared with
            its micro-batch; `jvpipe.trace.coupling` compares with a batch that is twice as large.
        remembered: the variables that the model state depends on.
        place_of: names the layer that an equation is in, for messages.
        lies_of: how each variable depends on the examples, for the equations followed so far.
        amended: how slices change equations, by the `id` of the equation.
        normalizing: the reductions over examples that a batch norm divides by.
        same: maps each variable to the result of the first equal equation (`first_of_same`).
        flows: the variables that a gradient flows through; None for all variables of inexact type.
    """

    examples: int
    fewer: int
    remembered: Collection[Var]
    place_of: Callable[[JaxprEqn], str]
    lies_of: dict[Var, Lies] = field(default_factory=dict)
    amended: dict[int, Beside] = field(default_factory=dict)
    normalizing: set[Var] = field(default_factory=set)
    same: Mapping[Var, Var] = field(default_factory=dict)
    flows: Collection[Var] | None = None
    _alike: Alike = field(default_factory=Alike)
    _rule: bool = False  # whether the equations are the backward of a derivative rule
    _in_rule: bool = False  # whether they are in a function with a rule, and so cannot be rewritten
    _outer: JaxprEqn | None = None  # the outermost loop or call around the equations

    def run(self, eqns: Sequence[JaxprEqn], small: Sequence[JaxprEqn]) -> None:
        """Finds how the results of equations depend on the examples.

        Args:
            eqns: the equations to follow.
            small: the same equations in the other trace.

        Raises:
            CoupledError: the traces differ in more than sizes, or the equations couple examples.
        """
        names = [eqn.primitive.name for eqn in eqns]
        small_names = [eqn.primitive.name for eqn in small]
        if names != small_names:
            pairs = zip(names, small_names, strict=False)
            differing = ((a, b) for a, b in pairs if a != b)
            one, other = next(differing, ("one", "none"))
            raise CoupledError(
                f"the loss has other operations on {self.fewer} examples than on {self.examples} "
                f"({other} instead of {one}): use larger micro-batches or fewer replicas, so that "
                "each replica has at least 2 examples"
            )
        for eqn, fewer in zip(eqns, small, strict=True):
            ins = [self.lies(a, b) for a, b in zip(eqn.invars, fewer.invars, strict=True)]
            outs = self._apply(eqn, fewer, ins)
            is_guard = self.amended.get(id(eqn)) is Beside.GUARD
            # Equal values have the same number in `Alike`, which shows that sum / count * count is
            # the sum. If a `stop_gradient` stops a gradient, its result gets a new number.
            if eqn.primitive.name != "stop_gradient" or not self._flows(eqn.invars[0]):
                self._alike.tell(eqn, guarded(eqn, ins, self._alike) if is_guard else None)
            self.lies_of.update(zip(eqn.outvars, outs, strict=True))

    def lies(self, atom: Atom, small: Atom) -> Lies:
        """Returns how a variable or literal depends on the examples.

        A literal with a factor n^p, for n examples, counts as a power of the number of examples.

        Args:
            atom: the variable or literal.
            small: the same variable or literal in the other trace.
        """
        if not isinstance(atom, Literal):
            return self.lies_of.get(atom, NONE)
        assert isinstance(small, Literal)
        a = np.asarray(atom.val)
        b = np.asarray(small.val)
        if a.dtype == b.dtype and a.tobytes() == b.tobytes():
            return NONE if a.any() else ZERO
        power = factor_power(a, b, self.examples / self.fewer)
        return Lies(Over.MIXED) if power is None else counted(power)

    def _apply(self, eqn: JaxprEqn, small: JaxprEqn, ins: Sequence[Lies]) -> list[Lies]:
        """Returns how the results of an equation depend on the examples.

        Args:
            eqn: the equation.
            small: the same equation in the other trace.
            ins: how its operands depend on the examples.
        """
        name = eqn.primitive.name
        for key, value in eqn.params.items():
            is_fixed = isinstance(value, int | float) or key in _POSITIONS
            if is_fixed and repr(small.params[key]) != repr(value):  # as text, because NaN != NaN
                raise self.refused(eqn, "has a parameter that depends on the number of examples")
        if name in CALLS | RULES:
            outs = self._call(eqn, small, ins)
            if name in RULES:
                self._check_rule(eqn, small, ins, outs)
            return outs
        if name == "optimization_barrier":
            return list(ins)
        if name in LOOPS:
            return LOOPS[name](self, eqn, small, ins)
        results = zip(eqn.outvars, small.outvars, strict=True)
        grown = [self._grown(eqn, a, b) for a, b in results]
        is_zero = makes_zero(eqn, ins, in_rule=self._rule)
        plain = self._plainly(eqn, ins, grown)
        outs = [self._normalized(eqn, ins, lies) for lies in plain]
        return [replace(lies, is_zero=is_zero) for lies in outs]

    def _plainly(
        self, eqn: JaxprEqn, ins: Sequence[Lies], grown: Sequence[int | None]
    ) -> list[Lies]:
        """Returns how the results of an equation depend on the examples, batch norms apart.

        Args:
            eqn: an equation that is neither a loop nor a call.
            ins: how its operands depend on the examples.
            grown: for each result, the axis whose size is proportional to the number of examples.
        """
        # There are three cases: an operand has the examples' axis; only a result has it; or
        # neither has it.
        #
        #     tanh x[n, 4]              ALONG, unless the axis is reduced: then SUM, MEAN or MIXED
        #     broadcast 0. to [n, 4]    ALONG the new axis
        #     sum(x) * 2                as `reduced` says
        moving = [x for x in ins if x.over is Over.ALONG]
        of_several = [x for x in ins if x.reduced and not x.is_count]
        if not moving:
            if any(axis is not None for axis in grown):
                return [self._spread_out(eqn, axis, ins) for axis in grown]
            return [self._reduced(eqn, ins) for _ in grown]
        self._check_uncoupled(eqn, of_several)
        axes = [x.axis if x.over is Over.ALONG else None for x in ins]
        axes_after = along_after(eqn, axes, grown)
        if isinstance(axes_after, str):
            raise self.refused(eqn, axes_after)
        # Each slice would add its examples to the same operand, so the sum of the slices' results
        # would include that operand once for each slice.
        is_sum_beside = eqn.primitive.name == "scatter-add" and ins[0].over is not Over.ALONG
        if is_sum_beside and not ins[0].is_zero:
            raise self.refused(eqn, "adds examples to other values: add these to the sum instead")
        power = power_after(eqn, ins)
        if power is None:
            raise self.refused(eqn, "uses the number of examples in the values of single examples")
        opened = open_of(moving)
        return [self._after(eqn, axis, power, opened) for axis in axes_after]

    def _normalized(self, eqn: JaxprEqn, ins: Sequence[Lies], lies: Lies) -> Lies:
        """Returns the `Lies` of a result with the batch-norm statistics that are open in it.

        Args:
            eqn: the equation that makes the result.
            ins: how its operands depend on the examples.
            lies: how the result depends on the examples, batch norms apart.
        """
        result = normalized(eqn, ins, lies)
        if result is None:
            raise self.refused(
                eqn,
                "reads examples from which a statistic of several examples was subtracted, in "
                "another way than a batch norm",
            )
        if result.over is Over.ALONG:
            # A statistic that is open in an operand, but not in the result, has just been used to
            # scale: its batch norm is complete.
            before = open_of(ins)
            self.normalizing |= before - result.open
            if not result.deviation:
                self.normalizing.update(*(x.roots for x in ins if x.deviation))
        return result

    def _after(self, eqn: JaxprEqn, axis: int | None, power: int, opened: frozenset[Var]) -> Lies:
        """Returns how a result depends on the examples if an operand has the examples' axis.

        Args:
            eqn: the equation that makes the result.
            axis: the examples' axis in the result; None if it has no such axis.
            power: p, if the result has the factor n^p for n examples.
            opened: the statistics that are open in the operands.
        """
        if axis is not None:
            return Lies(Over.ALONG, axis, power=power)
        is_sum = eqn.primitive.name in ("reduce_sum", "dot_general", "scatter-add")
        lies = summed_axes(power) if is_sum else Lies(Over.MIXED)
        # Outside a loop, the loop's first result stands for the reductions inside the loop.
        root = (self._outer or eqn).outvars[0]
        return replace(lies, roots=opened | {self.same.get(root, root)})

    def _grown(self, eqn: JaxprEqn, atom: Atom, small: Atom) -> int | None:
        """Returns the axis whose size grows with the number of examples; None if no size differs.

        Args:
            eqn: the equation that makes the value, for messages.
            atom: the value.
            small: the same value in the other trace.
        """
        shapes = _jax.aval(atom).shape, _jax.aval(small).shape
        axis = grown_axis(*shapes, self.examples, self.fewer)
        if isinstance(axis, str):
            raise self.refused(eqn, axis)
        return axis

    def _spread_out(self, eqn: JaxprEqn, axis: int | None, ins: Sequence[Lies]) -> Lies:
        """Returns how a result depends on the examples if only results have the examples' axis.

        Args:
            eqn: the equation, at least one of whose results has the examples' axis.
            axis: the examples' axis in this result; None if this result has no such axis.
            ins: how the operands depend on the examples.
        """
        name = eqn.primitive.name
        power = ins[0].power if name == "broadcast_in_dim" else 0
        self._check_uncoupled(eqn, [x for x in ins if x.reduced and not power])
        # To take a slice of random numbers, the equation that draws them is rewritten. This is
        # impossible inside a function with a derivative rule.
        fixed = self._in_rule and name in GENERATORS
        is_numbered = name != "iota" or eqn.params["dimension"] == axis
        if axis is None or (fixed and is_numbered):
            raise self.refused(
                eqn,
                "makes numbers for each example inside a derivative rule, or beside another result",
            )
        if name not in (*GENERATORS, "broadcast_in_dim", "empty", "full"):
            raise self.refused(
                eqn, "makes values for each example in a way for which jvpipe has no rule"
            )
        return Lies(Over.ALONG, axis, power=power)

    def _reduced(self, eqn: JaxprEqn, ins: Sequence[Lies]) -> Lies:
        """Returns the `Lies` of a result if neither it nor any operand has the examples' axis."""
        lies = reduced(eqn, ins, self._alike, in_rule=self._rule)
        if lies.beside is None:
            return lies
        is_remembered = eqn.outvars[0] in self.remembered
        # Slices change only the equations of the loss itself, and not those inside loops and calls.
        if self._outer is not None or (is_remembered and lies.beside not in _IN_FIRST):
            return Lies(Over.MIXED, roots=lies.roots)
        # The first slice alone may add an operand only if the operand depends on no example. A mean
        # differs between slices, so each slice adds its share of it.
        is_left = lies.beside in (Beside.LEFT, Beside.FIRST_LEFT)
        in_first = is_remembered and ins[0 if is_left else 1].over is Over.NONE
        self.amended[id(eqn)] = _IN_FIRST[lies.beside] if in_first else lies.beside
        return replace(lies, beside=None)

    def _check_uncoupled(self, eqn: JaxprEqn, reduced: Sequence[Lies]) -> None:
        """Raises CoupledError if single examples read a reduction that no model state keeps."""
        for lies in reduced:
            are_kept = all(root in self.remembered for root in lies.roots)
            if not lies.roots or not are_kept:
                raise self.refused(eqn, _GIVES)

    def refused(self, eqn: JaxprEqn, why: str) -> CoupledError:
        """Returns the error for an equation that couples examples.

        Args:
            eqn: the equation.
            why: what the equation does, as the predicate of a sentence about it.
        """
        outer = self._outer or eqn
        named = f"'{(eqn if self._rule else outer).primitive.name}'"
        subject = f"the backward of a derivative rule: its {named}" if self._rule else named
        scope = _jax.scope(outer)
        reason = f"{subject}{f' in {scope}' if scope else ''} {why}"
        return CoupledError.at(self.place_of(outer), reason)

    def inside(self, eqn: JaxprEqn, body: Jaxpr, small: Jaxpr, ins: Iterable[Lies]) -> list[Lies]:
        """Returns how the results of a body depend on the examples.

        Args:
            eqn: the loop or call that has the body.
            body: the body.
            small: the same body in the other trace.
            ins: how the inputs of the body depend on the examples.
        """
        flows = any(map(self._flows, eqn.outvars)) and eqn.primitive.name not in RULES
        inner = replace(
            self,
            lies_of=dict(zip(body.invars, map(_undivided, ins), strict=True)),
            flows=None if flows else (),  # a function with a rule gets its gradients from the rule
            _in_rule=self._in_rule or eqn.primitive.name in RULES,
            _alike=Alike(),
            _outer=self._outer or eqn,
        )
        inner.run(body.eqns, small.eqns)
        results = zip(body.outvars, small.outvars, strict=True)
        return [_undivided(inner.lies(a, b)) for a, b in results]

    def _call(self, eqn: JaxprEqn, small: JaxprEqn, ins: Sequence[Lies]) -> list[Lies]:
        body = _jax.inner_jaxprs(eqn)[0]
        fewer = _jax.inner_jaxprs(small)[0]
        return self.inside(eqn, body, fewer, ins)

    def _check_rule(
        self, eqn: JaxprEqn, small: JaxprEqn, ins: Sequence[Lies], outs: Sequence[Lies]
    ) -> None:
        """Checks that slices can compute the cotangents that a derivative rule returns.

        Args:
            eqn: the equation with the rule.
            small: the same equation in the other trace.
            ins: how its operands depend on the examples.
            outs: how its results depend on the examples.
        """
        flowing = [self._flows(v) for v in eqn.outvars]
        if not any(flowing):
            return
        operands = [i for i, atom in enumerate(eqn.invars) if self._flows(atom)]
        whole, moving = pullback(eqn, operands)
        try:
            fewer, _ = pullback(small, moving)
        except Exception as error:
            why = f"does not take {self.fewer} examples: {type(error).__name__}: {error}"
            raise self.refused(eqn, f"has a derivative rule that {why}") from error
        inner = replace(
            self,
            lies_of={},
            remembered=(),
            normalizing=set(),
            flows=(),
            _alike=Alike(),
            _rule=True,
            _in_rule=True,
            _outer=self._outer or eqn,
        )
        if comparable(whole.consts) != comparable(fewer.consts):
            raise inner.refused(eqn, "reads arrays that depend on the number of examples")
        cotangents = []
        for lies, flows, v in zip(outs, flowing, eqn.outvars, strict=True):
            if _is_inexact(v):
                cotangents.append(cotangent(lies) if flows else ZERO)
        inner.lies_of = dict(zip(whole.jaxpr.invars, [*ins, *cotangents], strict=True))
        inner.run(whole.jaxpr.eqns, fewer.jaxpr.eqns)
        for i, a, b in zip(moving, whole.jaxpr.outvars, fewer.jaxpr.outvars, strict=True):
            if not fits(inner.lies(a, b), cotangent(ins[i])):
                raise inner.refused(
                    eqn, f"gives operand {i} a cotangent that slices cannot compute independently"
                )

    def _flows(self, atom: Atom) -> bool:
        """Tells whether a gradient may flow through a value."""
        if not isinstance(atom, Var) or not _is_inexact(atom):
            return False
        return self.flows is None or atom in self.flows


def _is_inexact(atom: Atom) -> bool:
    return jnp.issubdtype(_jax.aval(atom).dtype, jnp.inexact)


def reaching(eqns: Sequence[JaxprEqn], results: Iterable[Atom]) -> set[Var]:
    """Returns the variables that results depend on, including the results."""
    reached = set(jaxprs.variables(results))
    for eqn in reversed(eqns):
        if not reached.isdisjoint(eqn.outvars):
            reached.update(jaxprs.variables(eqn.invars))
    return reached


def _undivided(lies: Lies) -> Lies:
    """Removes the `divisor` of a value, which is a number in the `Alike` of one body only."""
    return replace(lies, divisor=None)
