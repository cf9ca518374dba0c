"""Makes the equations of a layer on a slice of a micro-batch, the part for one replica of a stage.

A layer is traced twice: on the whole micro-batch, and at the size of the slice. The slice's
equations differ from the second trace in two ways.

Random numbers and positions are made for the whole micro-batch, and each slice takes its part. So
every replica draws all numbers, and dropout masks do not depend on the number of replicas. For a
slice of examples 2 and 3 of 8:

    whole     bits[8, 4] = random_bits key
    slice     bits[8, 4] = random_bits key    part[2, 4] = bits[2:4]

Equations that add to a sum over examples, or divide such a sum, are changed as `Beside`
(sums_and_means.py) says, so that the results of all slices add up to the result of the whole
micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import Atom, Jaxpr, JaxprEqn, Var
from jvpipe.ir.examples import Examples
from jvpipe.ir.layers import Ref
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.body import Body
from jvpipe.trace.flatten import CALLS, flatten
from jvpipe.trace.loops import LOOPS
from jvpipe.trace.spread import GENERATORS
from jvpipe.trace.sums_and_means import Beside

_REWRITTEN = (*LOOPS, *CALLS)
"""Primitives whose bodies are rewritten for a slice."""


@dataclass(frozen=True)
class SliceCut:
    """The rewriting of layers for one slice of a micro-batch.

    Args:
        examples: the examples of the slice.
        total: the number of examples of the micro-batch.
        amended: how slices change equations, by the `id` of the equation on the micro-batch.
        is_mean: whether the loss is a mean over the examples.
    """

    examples: Examples
    total: int
    amended: Mapping[int, Beside]
    is_mean: bool

    @property
    def share(self) -> float:
        """The fraction of the micro-batch's examples that are in the slice."""
        return self.examples.size / self.total

    def body(self, whole: Body, part: Body) -> Body:
        """Returns a layer on a slice, with the slice's part of the layer's random numbers.

        Args:
            whole: the layer on the micro-batch.
            part: the layer as traced at the size of the slice.
        """
        eqns = self._equations(whole.eqns, part.eqns)
        makes_loss = Ref(ValueKind.LOSS, 0) in part.writes
        # Each slice's mean is multiplied by its share, so that the slices' losses add up.
        is_scaled = makes_loss and self.is_mean
        return replace(
            part,
            eqns=tuple(eqns),
            share=self.share if is_scaled else 1.0,
        )

    def _equations(self, whole: Sequence[JaxprEqn], part: Sequence[JaxprEqn]) -> Sequence[JaxprEqn]:
        """Returns the equations of a layer, or of a loop in it, on a slice.

        Args:
            whole: the equations on the micro-batch.
            part: the same equations as traced at the size of the slice.
        """
        eqns: list[JaxprEqn] = []
        for of_whole, of_part in zip(whole, part, strict=True):
            name = of_whole.primitive.name
            if name in GENERATORS:
                eqns += self._generated(of_whole, of_part)
            elif name in _REWRITTEN:
                eqns.append(self._loop(of_whole, of_part))
            else:
                beside = self.amended.get(id(of_whole))
                is_first = self.examples.start == 0
                eqns += _amended(
                    of_part,
                    beside,
                    self.share,
                    is_first=is_first,
                )
        return eqns

    def _loop(self, whole: JaxprEqn, part: JaxprEqn) -> JaxprEqn:
        """Returns a loop or call on a slice, with its bodies rewritten."""

        def sliced(of_part: Jaxpr, of_whole: Jaxpr) -> Jaxpr:
            return of_part.replace(eqns=list(self._equations(of_whole.eqns, of_part.eqns)))

        params = dict(part.params)
        for name, value in whole.params.items():
            params[name] = jaxprs.with_bodies(sliced, params[name], value)
        return part.replace(params=params)

    def _generated(self, whole: JaxprEqn, part: JaxprEqn) -> Sequence[JaxprEqn]:
        """Returns the equations that draw all numbers of a micro-batch, and take a slice's part."""
        aval = _jax.aval(whole.outvars[0])
        sizes = zip(aval.shape, _jax.aval(part.outvars[0]).shape, strict=True)
        axes = [i for i, (a, b) in enumerate(sizes) if a != b]
        whole_operands = [_jax.aval(atom).shape for atom in whole.invars]
        part_operands = [_jax.aval(atom).shape for atom in part.invars]
        if not axes or whole_operands != part_operands:
            return [part]
        (axis,) = axes
        # An example has several rows if a reshape has merged its tokens into the examples' axis.
        rows = aval.shape[axis] // self.total
        start = self.examples.start * rows
        stop = self.examples.stop * rows

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.slice_in_dim(x, start, stop, axis=axis)

        drawn = _jax.new_variable(aval)
        draw = whole.replace(invars=part.invars, outvars=[drawn])
        return [draw, *_equations(cut, [drawn], part.outvars)]


def _amended(
    eqn: JaxprEqn,
    beside: Beside | None,
    share: float,
    *,
    is_first: bool,
) -> Sequence[JaxprEqn]:
    """Returns the equations that a slice computes in place of one equation.

    Args:
        eqn: the equation.
        beside: which of its operands a slice changes, and how; None if it changes none.
        share: the share of the slice in the micro-batch.
        is_first: whether the slice is the first one of the micro-batch.
    """
    only_first = beside in (Beside.FIRST_LEFT, Beside.FIRST_RIGHT)
    if beside is None or (only_first and is_first):
        return [eqn]
    if beside is Beside.GUARD:
        (count,) = jaxprs.variables(eqn.invars)
        return [eqn.replace(invars=[count, count])]
    if beside is Beside.DIVISOR:
        return _equations(_quotient, eqn.invars, eqn.outvars)
    side = 0 if beside in (Beside.LEFT, Beside.FIRST_LEFT) else 1
    operand = eqn.invars[side]
    changed = _jax.new_variable(_jax.aval(operand))

    def change(x: jax.Array) -> jax.Array:
        if only_first:
            # The zeros are the result of an equation that reads x. Plain zeros would become a
            # constant of the traced function, and a layer's equations cannot add new constants.
            zero = jnp.zeros((), x.dtype)
            return jax.lax.clamp(zero, x, zero)
        return x * jnp.asarray(share, x.dtype)

    invars = [changed if i == side else atom for i, atom in enumerate(eqn.invars)]
    return [*_equations(change, [operand], [changed]), eqn.replace(invars=invars)]


def _quotient(total: jax.Array, count: jax.Array) -> jax.Array:
    """Divides a sum by a count.

    In a slice without items, both are zero, and the quotient is zero. If only the count is zero,
    the result is NaN, and `stop_gradient` keeps this NaN out of the derivative.
    """
    divisor = jnp.where(count == 0, jnp.ones_like(count), count)
    quotient = total / divisor
    lost = (count == 0) & (jax.lax.stop_gradient(total) != 0)
    nan = jnp.asarray(jnp.nan, total.dtype)
    return quotient + jnp.where(lost, nan, jnp.zeros_like(total))


def _equations(
    fn: Callable[..., jax.Array],
    inputs: Sequence[Atom],
    outputs: Sequence[Var],
) -> Sequence[JaxprEqn]:
    """Returns the equations by which a function computes given output variables from inputs.

    Args:
        fn: the function, from arrays to an array.
        inputs: the variables or literals that it reads.
        outputs: the variables that stand for its results.
    """
    closed = flatten(fn, *map(jaxprs.shape_of, inputs))
    names: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    results = zip(closed.jaxpr.outvars, outputs, strict=True)
    names |= {v: output for v, output in results if isinstance(v, Var)}
    return jaxprs.renamed(closed.jaxpr.eqns, names)
