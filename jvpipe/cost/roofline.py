"""Seconds and bytes of equations on a device, from their shapes alone.

XLA fuses elementwise operations into the kernels that read them, so few values reach memory:
results and operands of products and the like, reductions, and results of the program. Each of these
has a kernel here, which reads the values in memory that it is made of:

    x --exp--> . --add--> . --dot--> y --tanh--> . --sum--> z        in memory: x, add's result, y, z
      [   first kernel    ] [second  ] [    third kernel    ]

A kernel takes (Williams et al., "Roofline", CACM 2009)

    launch + max(flops / rate of products, elementwise operations / their rate, bytes / rate of
    memory)

On a device with a tiling the first of the three is the seconds of waves of tiles (`tiling.py`).
Frameworks that do not fuse have a kernel for each equation that is not just another name of its
operand. A program takes at least the seconds in which its host starts all kernels.
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
    "reshape squeeze expand_dims bitcast_convert_type optimization_barrier laid_out name "
    "stop_gradient copy copy_p reduce_precision sharding_constraint transpose"
)
# No kernel either: readers make these as they go.
_MADE_ON_READING = _words("broadcast_in_dim iota")
_EXPONENTIALS = _words("exp exp2 log log1p expm1 tanh logistic sin cos pow")
_SPECIAL = _words("erf erfc erf_inv lgamma digamma tan atan2")
# No two kernels make one of these for themselves.
DEAR = (*_EXPONENTIALS, *_SPECIAL)
# Results of these are written even where all readers are elementwise.
REDUCTIONS = _words(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
)
# These read or write only a part of their operand, as large as their result or their update.
_PARTIAL = _words("slice dynamic_slice gather")
SCATTERS = _words("scatter scatter-add scatter-mul scatter_min scatter_max")
POOLS = _words(
    "reduce_window_max reduce_window_min reduce_window_sum reduce_window "
    "select_and_scatter_add select_and_gather_add"
)
# Elementwise operations per value of an equation; 1 if it is not listed.
_OPERATIONS: dict[str, float] = dict.fromkeys(
    _words("broadcast_in_dim iota convert_element_type concatenate pad slice select_n"),
    0.5,
)
_OPERATIONS |= dict.fromkeys((*_EXPONENTIALS, "rsqrt", "sqrt", "div"), 8.0)
_OPERATIONS |= dict.fromkeys(_SPECIAL, 20.0)
_RANDOM_OPERATIONS = 50.0  # of threefry, per word


def nbytes(atom: Atom) -> int:
    """Counts the bytes of a variable; a literal has none."""
    if isinstance(atom, _jax.Literal):
        return 0
    aval = _jax.aval(atom)
    return math.prod(aval.shape) * aval.dtype.itemsize


def seconds(closed: ClosedJaxpr, device: Accelerator) -> float:
    """Estimates the seconds of a program."""
    jaxpr = merged_equations(closed).jaxpr
    kernels = Kernels(
        jaxpr.eqns,
        jaxpr.outvars,
        device.platform,
        fuses=device.framework.fuses,
    )
    # Kernels run one after another.
    busy_s = 0.0
    for i, kernel in kernels.of.items():
        busy_s += _kernel_seconds(jaxpr.eqns[i], kernel, device)
    # The host starts one kernel after another, while earlier ones run.
    starting_s = len(kernels.of) * device.framework.host_s
    return float(max(busy_s, starting_s))


def equation_seconds(
    eqns: Sequence[JaxprEqn],
    outputs: Iterable[Atom],
    device: Accelerator,
) -> list[float]:
    """Estimates the seconds of each equation's kernel.

    0 if an equation is part of another's kernel.

    Args:
        eqns: of a program.
        outputs: its results.
        device: that would run it.
    """
    kernels = Kernels(
        eqns,
        outputs,
        device.platform,
        fuses=device.framework.fuses,
    )
    return [_kernel_seconds(eqn, kernels.of.get(i), device) for i, eqn in enumerate(eqns)]


@dataclass(frozen=True)
class _Kernel:
    """A kernel.

    Attributes:
        reads: the bytes that it reads of each value in memory.
        operations: its elementwise operations.
        written: the bytes that it writes.
    """

    reads: dict[Var, int]
    operations: float
    written: int


class Kernels:
    """The equations of a program as kernels.

    Attributes:
        root: by variable, the first name of its value.
        written: the values that reach memory, by their first names.
        of: by the place of an equation that has a kernel, that kernel.
        fused: by variable, what a kernel that uses it reads of memory, and computes, for it. For a
            value in memory that is the value itself, and nothing to compute. Operations are by the
            place of their equation, so that a value that is used twice counts once.
    """

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
            for v in (*jaxprs.variables(eqn.invars), *eqn.outvars):
                self.root.setdefault(v, v)
            source = eqn.invars[0] if eqn.primitive.name in _ALIASES else None
            if isinstance(source, Var) and len(eqn.outvars) == 1:
                (alias,) = eqn.outvars
                self.root[alias] = self.root[source]
        self.written = self._written(eqns, outputs, platform, fuses)
        self.of: dict[int, _Kernel] = {}
        self.fused: dict[Var, tuple[dict[Var, int], dict[int, float]]] = {}
        for i, eqn in enumerate(eqns):
            reads, operations = self._uses(i, eqn)
            if not self.written.isdisjoint(eqn.outvars):
                self.of[i] = _Kernel(reads, sum(operations.values()), _written_bytes(eqn))
            for v in eqn.outvars:
                in_memory = ({v: nbytes(v)}, {})
                self.fused[v] = in_memory if v in self.written else (reads, operations)

    def _written(
        self,
        eqns: Sequence[JaxprEqn],
        outputs: Iterable[Atom],
        platform: str,
        fuses: bool,
    ) -> set[Var]:
        """Finds the values that reach memory: results, and what a kernel writes or cannot make
        itself.
        """
        # A value reaches memory if it is a result, if its kernel cannot be part of another, or if a
        # kernel reads it that cannot make it.
        needed = list(jaxprs.variables(outputs))
        for eqn in eqns:
            fused = fuses or _is_free(eqn)
            if fused and not _is_kernel(eqn, platform):
                continue
            needed += eqn.outvars
            if _reads_memory(eqn, platform):
                needed += jaxprs.variables(eqn.invars)
        return {self.root.get(v, v) for v in needed}

    def _uses(self, i: int, eqn: JaxprEqn) -> tuple[dict[Var, int], dict[int, float]]:
        """Finds the values in memory that equation i is made of, and the operations since then."""
        reads: dict[Var, int] = {}
        operations = {i: _operations(eqn)}
        for v in jaxprs.variables(eqn.invars):
            sizes, since = self.fused.get(v, ({v: nbytes(v)}, {}))
            for u, size in sizes.items():
                reads[u] = max(size, reads.get(u, 0))
            operations |= since
        if eqn.primitive.name in _PARTIAL:
            # It reads no more of its operands than it yields.
            limit = sum(map(nbytes, eqn.outvars))
            reads = {u: min(size, limit) for u, size in reads.items()}
        return reads, operations


def _written_bytes(eqn: JaxprEqn) -> int:
    """Counts the bytes that an equation writes: of a scatter or an update in place, those of the
    update.
    """
    if eqn.primitive.name in (*SCATTERS, "dynamic_update_slice"):
        return nbytes(eqn.invars[-1])
    return sum(map(nbytes, eqn.outvars))


def _is_free(eqn: JaxprEqn) -> bool:
    """Tells whether no framework has a kernel for an equation."""
    return eqn.primitive.name in (*_ALIASES, *_MADE_ON_READING)


def _is_kernel(eqn: JaxprEqn, platform: str) -> bool:
    """Tells whether an equation's results reach memory, whatever reads them.

    Random bits of threefry are elementwise, except on CPUs. A scatter that puts one value into each
    row is a comparison with the numbers of columns on a TPU.
    """
    if eqn.primitive.name in SCATTERS:
        return platform != "tpu" or not eqn.params["dimension_numbers"].operand_batching_dims
    if is_random(eqn):
        return platform == "cpu" or "fry" not in str(_jax.aval(eqn.invars[0]).dtype)
    return is_heavy(eqn) or eqn.primitive.name in REDUCTIONS


def _reads_memory(eqn: JaxprEqn, platform: str) -> bool:
    """Tells whether a kernel can only read its operands from memory, and not make them itself.

    A GPU gathers and pools from values that the same kernel makes.
    """
    if eqn.primitive.name in ("gather", *POOLS):
        return platform != "cuda"
    return is_heavy(eqn) and eqn.primitive.name not in SCATTERS


def _operations(eqn: JaxprEqn) -> float:
    """Counts the elementwise operations of an equation; a product has none."""
    name = eqn.primitive.name
    if name in _ALIASES or (is_heavy(eqn) and flops(eqn)):
        return 0.0
    loops_over_inputs = name in REDUCTIONS or name == "sort"
    looped = eqn.invars if loops_over_inputs else eqn.outvars
    size = max((math.prod(_jax.aval(v).shape) for v in looped), default=0)
    if is_random(eqn) or name == "threefry2x32":
        return _RANDOM_OPERATIONS * size
    if name == "sort":
        return size * math.log2(max(size, 2))
    return _OPERATIONS.get(name, 1.0) * size


def _kernel_seconds(eqn: JaxprEqn, kernel: _Kernel | None, device: Accelerator) -> float:
    if kernel is None:
        return 0.0
    if bodies := _jax.inner_jaxprs(eqn):
        return device.launch_s + _loop_seconds(eqn, bodies, device)
    work = flops(eqn)
    passes = 1.0 if work else device.framework.passes
    moved = sum(kernel.reads.values()) + kernel.written
    multiplying_s = _product_seconds(eqn, work, device) if work else 0.0
    elementwise_s = kernel.operations / device.elementwise_per_s
    moving_s = moved * passes / device.memory_bytes_per_s
    return device.launch_s + max(multiplying_s, elementwise_s, moving_s)


def _product_seconds(eqn: JaxprEqn, work: int, device: Accelerator) -> float:
    dtype = _jax.aval(eqn.invars[0]).dtype
    rate = device.products_per_s(str(dtype))
    product = product_of(eqn)
    if device.tiling is None or product is None or not device.cores:
        return work / rate
    return product_s(
        product,
        device.tiling,
        device.cores,
        rate,
        device.memory_bytes_per_s,
    )


def _loop_seconds(eqn: JaxprEqn, bodies: Sequence[Jaxpr], device: Accelerator) -> float:
    """Estimates an equation with bodies: a scan's as often as it runs, a while's once, the longest
    branch.
    """
    body_seconds = [sum(equation_seconds(body.eqns, body.outvars, device)) for body in bodies]
    if eqn.primitive.name == "cond":
        return max(body_seconds)
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return sum(body_seconds) * times
