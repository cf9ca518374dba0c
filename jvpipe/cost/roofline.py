"""Seconds and bytes of equations on a device, from their shapes alone.

XLA fuses elementwise operations into what reads them, so few values reach memory: results of products and the like,
reductions, operands of products, and what a program yields. Each of these is a kernel here; it takes

    launch + max(flops / flops per second, elementwise operations / per second, bytes read and written / per second)

and reads the values in memory that it is made of (Williams et al., "Roofline", CACM 2009). On a device with a tiling
the first of the three is what the waves of tiles take (`tiling.py`). Frameworks that do not fuse have a kernel for each
equation that is no other name of its operand; a program takes at least what its host needs to start all kernels.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.products import product_of
from jvpipe.cost.tiling import product_s
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import merged_equations
from jvpipe.trace.primitives import flops, is_heavy, is_random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Other names of their operand: no kernel.
_ALIASES = _words(
    "reshape squeeze expand_dims bitcast_convert_type optimization_barrier laid_out name stop_gradient copy copy_p "
    "reduce_precision sharding_constraint transpose"
)
# Nor are these, which readers make as they go.
_MADE_ON_READING = _words("broadcast_in_dim iota")
# Results of these are written even where all readers are elementwise.
REDUCTIONS = _words(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
)
# These read, or write, only a part of their operand: as much as their result, or the update, has.
_PARTIAL = _words("slice dynamic_slice gather")
SCATTERS = _words("scatter scatter-add scatter-mul scatter_min scatter_max")
POOLS = _words(
    "reduce_window_max reduce_window_min reduce_window_sum reduce_window select_and_scatter_add select_and_gather_add"
)
# What an equation counts as, in elementwise operations per value; 1 if it is not listed.
_OPERATIONS: dict[str, float] = dict.fromkeys(
    _words("broadcast_in_dim iota convert_element_type concatenate pad slice select_n"), 0.5
)
_OPERATIONS |= dict.fromkeys(
    _words("exp exp2 log log1p expm1 tanh logistic sin cos rsqrt sqrt div pow"), 8.0
)
_OPERATIONS |= dict.fromkeys(_words("erf erfc erf_inv lgamma digamma tan atan2"), 20.0)
_RANDOM_OPERATIONS = 50.0  # of threefry, per word


def nbytes(atom: Atom) -> int:
    """The bytes of a variable; those of a literal are nothing."""
    if isinstance(atom, _jax.Literal):
        return 0
    aval = _jax.aval(atom)
    return math.prod(aval.shape) * aval.dtype.itemsize


def seconds(closed: ClosedJaxpr, device: Accelerator) -> float:
    """Estimates the seconds of a program."""
    jaxpr = merged_equations(closed).jaxpr
    kernels = Kernels(jaxpr.eqns, jaxpr.outvars, device.platform, fuses=device.framework.fuses)
    busy_s = sum(_kernel_seconds(jaxpr.eqns[i], kernel, device) for i, kernel in kernels.of.items())
    return float(max(busy_s, len(kernels.of) * device.framework.host_s))


def equation_seconds(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], device: Accelerator
) -> list[float]:
    """Estimates the seconds of each equation's kernel; 0 if an equation is part of another's kernel.

    Args:
        eqns: of a program.
        outputs: what the program yields.
        device: that would run it.
    """
    kernels = Kernels(eqns, outputs, device.platform, fuses=device.framework.fuses)
    return [_kernel_seconds(eqn, kernels.of.get(i), device) for i, eqn in enumerate(eqns)]


@dataclass(frozen=True)
class _Kernel:
    """A kernel: what it reads (bytes per value in memory), its elementwise operations, the bytes that it writes."""

    reads: dict[Var, int]
    operations: float
    written: int


class Kernels:
    """Equations as kernels: `of` those of equations that have one, `written` the values that reach memory."""

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        outputs: Iterable[Atom],
        platform: str = "cuda",
        *,
        fuses: bool = True,
    ) -> None:
        self.root: dict[Var, Var] = {}
        for eqn in eqns:
            self.root |= {
                v: self.root.get(v, v) for v in [*jaxprs.variables(eqn.invars), *eqn.outvars]
            }
            source = eqn.invars[0] if eqn.primitive.name in _ALIASES else None
            if isinstance(source, Var) and len(eqn.outvars) == 1:
                self.root[eqn.outvars[0]] = self.root[source]
        self.written = self._written(eqns, outputs, platform, fuses)
        self.of: dict[int, _Kernel] = {}
        self.fused: dict[Var, tuple[dict[Var, int], dict[int, float]]] = {}
        for i, eqn in enumerate(eqns):
            reads, operations = self._traced(i, eqn)
            kernel = not self.written.isdisjoint(eqn.outvars)
            if kernel:
                size = (
                    nbytes(eqn.invars[-1])
                    if eqn.primitive.name in (*SCATTERS, "dynamic_update_slice")
                    else sum(map(nbytes, eqn.outvars))
                )
                self.of[i] = _Kernel(reads, sum(operations.values()), size)
            for v in eqn.outvars:
                self.fused[v] = ({v: nbytes(v)}, {}) if v in self.written else (reads, operations)

    def _written(
        self, eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], platform: str, fuses: bool
    ) -> set[Var]:
        needed = list(jaxprs.variables(outputs))
        for eqn in eqns:
            if _is_kernel(eqn, platform) or not (fuses or _is_free(eqn)):
                needed += eqn.outvars
                needed += jaxprs.variables(eqn.invars) if _reads_memory(eqn, platform) else ()
        return {self.root.get(v, v) for v in needed}

    def _traced(self, i: int, eqn: JaxprEqn) -> tuple[dict[Var, int], dict[int, float]]:
        """The values in memory that an equation is made of, and the operations since then."""
        reads: dict[Var, int] = {}
        operations = {i: _operations(eqn)}
        for v in jaxprs.variables(eqn.invars):
            sizes, since = self.fused.get(v, ({v: nbytes(v)}, {}))
            reads |= {u: max(size, reads.get(u, 0)) for u, size in sizes.items()}
            operations |= since
        if eqn.primitive.name in _PARTIAL:
            limit = sum(map(nbytes, eqn.outvars))
            reads = {u: min(size, limit) for u, size in reads.items()}
        return reads, operations


def _is_free(eqn: JaxprEqn) -> bool:
    """Tells whether no framework has a kernel for an equation."""
    return eqn.primitive.name in (*_ALIASES, *_MADE_ON_READING)


def _is_kernel(eqn: JaxprEqn, platform: str) -> bool:
    """Tells whether an equation's results reach memory, whatever reads them.

    Random bits of threefry are elementwise, except on CPUs. A scatter that puts one value into each row is a
    comparison with the numbers of columns on a TPU.
    """
    if eqn.primitive.name in SCATTERS:
        return platform != "tpu" or not eqn.params["dimension_numbers"].operand_batching_dims
    if is_random(eqn):
        return platform == "cpu" or "fry" not in str(_jax.aval(eqn.invars[0]).dtype)
    return is_heavy(eqn) or eqn.primitive.name in REDUCTIONS


def _reads_memory(eqn: JaxprEqn, platform: str) -> bool:
    """Tells whether the operands of a kernel are in memory, not made inside it.

    A GPU gathers and pools from what it makes at once.
    """
    if eqn.primitive.name in ("gather", *POOLS):
        return platform != "cuda"
    return is_heavy(eqn) and eqn.primitive.name not in SCATTERS


def _operations(eqn: JaxprEqn) -> float:
    """The elementwise operations of an equation."""
    if eqn.primitive.name in _ALIASES or (is_heavy(eqn) and flops(eqn)):
        return 0.0
    reduced = eqn.primitive.name in REDUCTIONS or eqn.primitive.name == "sort"
    size = max(
        [math.prod(_jax.aval(v).shape) for v in (eqn.invars if reduced else eqn.outvars)], default=0
    )
    if is_random(eqn) or eqn.primitive.name == "threefry2x32":
        return _RANDOM_OPERATIONS * size
    if eqn.primitive.name == "sort":
        return size * math.log2(max(size, 2))
    return _OPERATIONS.get(eqn.primitive.name, 1.0) * size


def _kernel_seconds(eqn: JaxprEqn, kernel: _Kernel | None, device: Accelerator) -> float:
    if kernel is None:
        return 0.0
    if bodies := _jax.inner_jaxprs(eqn):
        return device.launch_s + _loop_seconds(eqn, bodies, device)
    work = flops(eqn)
    moved = sum(kernel.reads.values()) + kernel.written
    return device.launch_s + max(
        _product_seconds(eqn, work, device) if work else 0.0,
        kernel.operations / device.elementwise_per_s,
        moved * (1.0 if work else device.framework.passes) / device.memory_bytes_per_s,
    )


def _product_seconds(eqn: JaxprEqn, work: int, device: Accelerator) -> float:
    rate = device.products_per_s(str(_jax.aval(eqn.invars[0]).dtype))
    product = product_of(eqn)
    if device.tiling is None or product is None or not device.cores:
        return work / rate
    return product_s(product, device.tiling, device.cores, rate, device.memory_bytes_per_s)


def _loop_seconds(eqn: JaxprEqn, bodies: Sequence[Jaxpr], device: Accelerator) -> float:
    """Equations with bodies of their own: a scan's as often as it runs, a while's once, of branches the longest."""
    body_seconds = [sum(equation_seconds(body.eqns, body.outvars, device)) for body in bodies]
    if eqn.primitive.name == "cond":
        return max(body_seconds)
    return sum(body_seconds) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
