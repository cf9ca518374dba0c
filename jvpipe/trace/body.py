"""The equations of one layer, with the values that it reads and writes.

A layer's backward gets cotangents for some of the values that the layer writes, and returns
gradients for some of the values that it reads. The candidates of a layer are the values that may be
kept, swapped to the host or computed again between its forward and its backward.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from jvpipe import _jax
from jvpipe._jax import Atom, JaxprEqn, Var
from jvpipe.ir.layers import Ref
from jvpipe.ir.values import ValueKind
from jvpipe.trace import jaxprs
from jvpipe.trace.primitives import is_cheap, is_heavy, is_random
from jvpipe.trace.structure import Structure, structure


@dataclass(frozen=True)
class Body:
    """The equations of a layer.

    The items of `reads` and `inputs` correspond, and so do those of `writes` and `outputs`.

    Attributes:
        eqns: the equations, in order.
        reads: names of the values that the layer reads, parameters first.
        writes: names of the values that the layer writes.
        inputs: the variables of `reads`.
        outputs: the variables of `writes`.
        differentiable: marks the inputs that a gradient flows to if no parameter is frozen.
        active: marks the outputs whose cotangents the backward gets if no parameter is frozen.
        candidates: the variables whose fate (keep, swap or recompute) can be chosen, with names.
        returned: marks the inputs whose gradient is used, given the frozen parameters. The backward
            is made for all differentiable inputs and then pruned to these. A backward made for
            fewer inputs would have other equations, and the compiler might round the remaining
            gradients differently.
        received: marks the outputs whose cotangents the backward gets, given the frozen parameters.
        share: the factor that multiplies the loss of a slice; 1 unless the loss is a mean.
    """

    eqns: tuple[JaxprEqn, ...]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    differentiable: tuple[bool, ...]
    active: tuple[bool, ...]
    candidates: dict[Var, str]
    returned: tuple[bool, ...]
    received: tuple[bool, ...]
    share: float = 1.0

    @cached_property
    def moving(self) -> tuple[int, ...]:
        """The positions of the differentiable inputs."""
        return tuple(i for i, d in enumerate(self.differentiable) if d)

    @cached_property
    def structure(self) -> Structure:
        """A value that is equal for two bodies only if they compute the same function."""
        return structure(self.eqns, self.inputs, self.outputs)


def body_of(
    eqns: Sequence[JaxprEqn],
    reads: Sequence[tuple[Var, Ref]],
    writes: Sequence[tuple[Atom, Ref]],
    flows: Sequence[Collection[Var]],
    main: Sequence[JaxprEqn],
) -> Body:
    """Returns a layer's body.

    Args:
        eqns: its equations.
        reads: its inputs, parameters first.
        writes: its outputs.
        flows: two sets of values that gradients flow through: the first if no parameter is frozen,
            the second given the frozen parameters.
        main: the equations among `eqns` that no other layer computes.
    """
    loss = Ref(ValueKind.LOSS, 0)
    summed = (ValueKind.PARAMETER, ValueKind.TENSOR)

    def inputs(flow: Collection[Var]) -> tuple[bool, ...]:
        return tuple(ref.kind in summed and v in flow for v, ref in reads)

    def outputs(flow: Collection[Var]) -> tuple[bool, ...]:
        tensors = {ref for v, ref in writes if ref.kind == ValueKind.TENSOR and v in flow}
        return tuple(ref == loss or ref in tensors for _, ref in writes)

    # Both pairs of marks are needed: `differentiable` and `active` decide how the backward is
    # traced, `returned` and `received` what is left of it when parameters are frozen.
    every, trained = flows
    return Body(
        tuple(eqns),
        tuple(ref for _, ref in reads),
        tuple(ref for _, ref in writes),
        tuple(v for v, _ in reads),
        tuple(v for v, _ in writes),
        inputs(every),
        outputs(every),
        _candidates(eqns, main),
        inputs(trained),
        outputs(trained),
    )


def _candidates(eqns: Sequence[JaxprEqn], main: Sequence[JaxprEqn]) -> dict[Var, str]:
    """Returns the values whose fate can be chosen, with names.

    They are random bits, and the results of heavy equations such as products, which XLA writes to
    memory in any case. If random bits only serve to make a mask, the mask replaces them.

    Args:
        eqns: the equations of a layer.
        main: the main equations among them.
    """
    candidates: dict[Var, str] = {}
    for eqn in main:
        if not (is_heavy(eqn) or is_random(eqn)):
            continue
        for var in eqn.outvars:
            if not _jax.is_dropped(var):
                kept = _mask_of(var, eqns) if is_random(eqn) else var
                candidates[kept] = f"{eqn.primitive.name}_{len(candidates)}"
    return candidates


def _mask_of(bits: Var, eqns: Sequence[JaxprEqn]) -> Var:
    """Returns the boolean mask that random bits become; the bits if they do not become a mask.

    A mask takes one byte per element, and random bits take four. The mask must follow from the bits
    by cheap equations with one result each, and each of these results must have one reader.
    """
    current = bits
    while True:
        readers = [eqn for eqn in eqns if current in jaxprs.variables(eqn.invars)]
        # With a second reader, the value itself would be needed beside the mask.
        if len(readers) != 1:
            return bits
        if len(readers[0].outvars) != 1 or not is_cheap(readers[0]):
            return bits
        current = readers[0].outvars[0]
        if _jax.aval(current).dtype == bool:
            return current
