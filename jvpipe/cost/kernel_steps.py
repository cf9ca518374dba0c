"""The steps of a program, from which `temporaries.py` counts the program's temporary bytes.

A step is a kernel, or several kernels that a compiler joins into one. It lists the values that
it reads from memory and writes to memory. Steps are in the order in which they run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jvpipe import _jax
from jvpipe._jax import Atom, Jaxpr, JaxprEqn, Var
from jvpipe.cost.roofline import REDUCTIONS, SCATTERS, Kernel, Kernels
from jvpipe.trace import jaxprs
from jvpipe.trace.primitives import is_heavy

Shape = tuple[int, ...]


@dataclass(frozen=True)
class KernelStep:
    """A kernel, or several kernels that a compiler joins into one.

    Attributes:
        reads: the values that it reads from memory.
        writes: the values that it writes to memory.
        loop: the shape that it loops over; None for products, scatters and other heavy equations.
        own_bytes: the bytes that it needs while it runs, in addition to what it reads and writes.
    """

    reads: frozenset[Var]
    writes: frozenset[Var]
    loop: Shape | None
    own_bytes: int = 0


class KernelProgram(Kernels):
    """The equations of a program with their kernels.

    Args:
        jaxpr: the program, in which calls are replaced by the equations that they run.
        platform: `cuda`, `tpu` or `cpu`; it decides which equations are fused into one kernel.

    Attributes:
        eqns: the equations.
        inputs: the variables of its inputs.
        results: the first names of its results, before any alias such as a reshape.
        readers: by value in memory, the number of kernels that read it.
    """

    def __init__(self, jaxpr: Jaxpr, platform: str) -> None:
        super().__init__(jaxpr.eqns, jaxpr.outvars, platform)
        self.eqns = jaxpr.eqns
        self.inputs = {*jaxpr.invars}
        self.results = self.roots(jaxpr.outvars)
        self.readers = Counter(v for kernel in self.of.values() for v in kernel.reads)

    def roots(self, atoms: Iterable[Atom]) -> set[Var]:
        """Returns the first names of values: the variables before any alias, such as a reshape."""
        return {self.root.get(v, v) for v in jaxprs.variables(atoms)}

    def named(self, *primitives: str) -> Iterator[JaxprEqn]:
        """Yields the equations with one of the given primitives."""
        return (eqn for eqn in self.eqns if eqn.primitive.name in primitives)

    def with_kernels(self) -> Iterator[tuple[JaxprEqn, Kernel]]:
        """Yields each equation that has a kernel, and its kernel."""
        return ((self.eqns[i], kernel) for i, kernel in self.of.items())


def dims_of(v: Atom) -> Shape:
    """Returns the shape of a value."""
    return _jax.aval(v).shape


def loop_of(eqn: JaxprEqn) -> Shape | None:
    """Returns the shape that an elementwise kernel or a reduction loops over; None for others."""
    if is_heavy(eqn) or eqn.primitive.name in SCATTERS:
        return None
    # A reduction reads each element of its operand, so its loop has the shape of the operand, even
    # if the result is a single number.
    looped = eqn.invars if eqn.primitive.name in REDUCTIONS else eqn.outvars
    return dims_of(looped[0])


def is_batched(eqn: JaxprEqn) -> bool:
    """Tells whether an equation is a batch of matrix products."""
    if eqn.primitive.name != "dot_general":
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return bool(batch)
