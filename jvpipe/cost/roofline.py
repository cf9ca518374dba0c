"""Seconds and bytes of a program's equations on a device, estimated from their shapes alone.

A kernel is what a device computes in one launch. XLA fuses elementwise operations into the
kernels that read their results. So few values reach memory: the operands and results of heavy
equations such as products, the results of reductions, and the results of the program. In this
model, each equation that makes such a value has a kernel. The kernel reads the values in memory
from which its value is computed:

    x --exp--> . --add--> u --dot--> y --tanh--> . --sum--> z        arrows: equations
      [   first kernel    ] [second  ] [    third kernel    ]        dots: values inside a kernel
                                                                     in memory: x, u, y, z

A kernel takes (Williams et al., "Roofline", CACM 2009)

    launch + max(flops / rate of products,
                 elementwise operations / rate of elementwise operations,
                 bytes read and written / rate of memory)

On a device with a tiling, `tiling.py` gives the first of the three terms. In a framework that does
not fuse, each equation has a kernel, except aliases, and except broadcasts and the like, which each
reader computes for itself. A program takes at least the time that its host needs to launch all
kernels.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.matrix_products import product_of
from jvpipe.cost.tiling import product_s
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import merged_equations
from jvpipe.trace.primitives import flops, is_heavy, is_random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# These equations have no kernel: their result counts as another name of their operand. For a
# transpose, this assumes that its readers read the operand in another order.
_ALIASES = _words(
    "reshape squeeze expand_dims bitcast_convert_type optimization_barrier laid_out name "
    "stop_gradient copy copy_p reduce_precision sharding_constraint transpose"
)
# These equations have no kernel: each kernel that reads their result computes it while reading.
_MADE_ON_READING = _words("broadcast_in_dim iota")
_EXPONENTIALS = _words("exp exp2 log log1p expm1 tanh logistic sin cos pow")
_SPECIAL = _words("erf erfc erf_inv lgamma digamma tan atan2")
# If two kernels read such a value, computing it in each of them is too expensive.
DEAR = (*_EXPONENTIALS, *_SPECIAL)
# The results of these reach memory even if all their readers are elementwise.
REDUCTIONS = _words(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
)
# These equations read only a part of their operand. The part is as large as their result.
_PARTIAL = _words("slice dynamic_slice gather")
SCATTERS = _words("scatter scatter-add scatter-mul scatter_min scatter_max")
POOLS = _words(
    "reduce_window_max reduce_window_min reduce_window_sum reduce_window "
    "select_and_scatter_add select_and_gather_add"
)
# Elementwise operations per element that an equation computes; 1 for primitives not listed here.
_OPERATIONS: dict[str, float] = dict.fromkeys(
    _words("broadcast_in_dim iota convert_element_type concatenate pad slice select_n"),
    0.5,
)
_OPERATIONS |= dict.fromkeys((*_EXPONENTIALS, "rsqrt", "sqrt", "div"), 8.0)
_OPERATIONS |= dict.fromkeys(_SPECIAL, 20.0)
_RANDOM_OPERATIONS = 50.0  # operations of threefry per random word


def seconds(closed: ClosedJaxpr, device: Accelerator) -> float:
    """Estimates the seconds of a program."""
    jaxpr = merged_equations(closed).jaxpr
    kernels_s = _kernels_s(jaxpr.eqns, jaxpr.outvars, device)
    # Kernels run one after another, so their seconds add up.
    busy_s = 0.0
    for kernel_s in kernels_s.values():
        busy_s += kernel_s
    # The host launches kernels while earlier kernels run: the slower of host and device counts.
    return float(max(busy_s, len(kernels_s) * device.framework.host_s))


def equation_seconds(
    eqns: Sequence[JaxprEqn],
    outputs: Iterable[Atom],
    device: Accelerator,
) -> list[float]:
    """Estimates the seconds of each equation's kernel; 0 for equations fused into another's kernel.

    Args:
        eqns: the equations of a program.
        outputs: the results of the program.
        device: the device that would run the program.
    """
    kernels_s = _kernels_s(eqns, outputs, device)
    return [kernels_s.get(i, 0.0) for i in range(len(eqns))]


def _kernels_s(
    eqns: Sequence[JaxprEqn],
    outputs: Iterable[Atom],
    device: Accelerator,
) -> dict[int, float]:
    """Estimates the seconds of each kernel, by the index of its equation."""
    kernels = Kernels(eqns, outputs, device.platform, fuses=device.framework.fuses)
    return {i: _kernel_seconds(eqns[i], kernel, device) for i, kernel in kernels.of.items()}


@dataclass(frozen=True)
class Kernel:
    """The work of one kernel besides its products.

    Attributes:
        reads: by value in memory, the bytes of it that the kernel reads.
        operations: its elementwise operations.
        written: the bytes that it writes.
    """

    reads: dict[Var, int]
    operations: float
    written: int


class Kernels:
    """The kernels of a program's equations.

    An equation has a kernel if a result of the equation reaches memory.

    Args:
        eqns: the equations of a program.
        outputs: the results of the program.
        platform: `cuda`, `tpu` or `cpu`.
        fuses: whether the framework fuses elementwise operations into other kernels.

    Attributes:
        root: by alias, its first name: the variable of the same value before any alias.
        written: the first names of the values that reach memory.
        of: by the index of an equation, its kernel. Equations without a kernel are missing.
        fused: by variable that is not in memory, what a kernel must do to use it, as two
            dicts. The first has the bytes to read, by value in memory. The second has the
            elementwise operations, by the index of their equation, so that an equation
            that a kernel uses twice counts once.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        outputs: Iterable[Atom],
        platform: str,
        *,
        fuses: bool = True,
    ) -> None:
        self.root: dict[Var, Var] = {}
        for eqn in eqns:
            if eqn.primitive.name in _ALIASES and len(eqn.outvars) == 1:
                source = eqn.invars[0]
                if isinstance(source, Var):
                    self.root[eqn.outvars[0]] = self.root.get(source, source)
        # A value reaches memory if it is a result of the program, if its equation cannot be fused
        # into the kernel of a reader, or if a reader can only read its operands from memory.
        needed = jaxprs.variables(outputs)
        for eqn in eqns:
            # Aliases, and what readers compute for themselves, have no kernel in any framework.
            fused = fuses or eqn.primitive.name in (*_ALIASES, *_MADE_ON_READING)
            if not fused or _is_kernel(eqn, platform):
                needed += eqn.outvars
                if _reads_memory(eqn, platform):
                    needed += jaxprs.variables(eqn.invars)
        self.written = {self.root.get(v, v) for v in needed}
        self.of: dict[int, Kernel] = {}
        self.fused: dict[Var, tuple[dict[Var, int], dict[int, float]]] = {}
        for i, eqn in enumerate(eqns):
            reads, operations = self._uses(i, eqn)
            if not self.written.isdisjoint(eqn.outvars):
                self.of[i] = Kernel(reads, sum(operations.values()), _written_bytes(eqn))
            self.fused |= dict.fromkeys({*eqn.outvars} - self.written, (reads, operations))

    def _uses(self, i: int, eqn: JaxprEqn) -> tuple[dict[Var, int], dict[int, float]]:
        """Returns the bytes that equation i reads, by value in memory, and its operations.

        Both include the equations that are fused into equation i. The operations are listed by the
        index of their equation.
        """
        reads: dict[Var, int] = {}
        operations = {i: _operations(eqn)}
        for v in jaxprs.variables(eqn.invars):
            sizes, since = self.fused.get(v, ({v: jaxprs.bytes_of(v)}, {}))
            for u, size in sizes.items():
                reads[u] = max(size, reads.get(u, 0))
            operations |= since
        if eqn.primitive.name in _PARTIAL:
            # Such an equation reads at most as many bytes of an operand as its results have.
            limit = sum(map(jaxprs.bytes_of, eqn.outvars))
            reads = {u: min(size, limit) for u, size in reads.items()}
        return reads, operations


def _written_bytes(eqn: JaxprEqn) -> int:
    """Counts the bytes that an equation writes; scatters and dynamic updates write only updates."""
    written = eqn.outvars
    if eqn.primitive.name in SCATTERS:
        written = eqn.invars[-1:]
    elif eqn.primitive.name == "dynamic_update_slice":
        written = eqn.invars[1:2]  # the start indices come after the update
    return sum(map(jaxprs.bytes_of, written))


def _is_kernel(eqn: JaxprEqn, platform: str) -> bool:
    """Tells whether an equation's results reach memory, whatever reads them.

    For two kinds of equations this depends on the platform. Random bits of threefry are
    elementwise except on CPUs. A scatter that puts one value into each row (one with batching
    dimensions) is elementwise on TPUs. There it becomes a comparison: each place of a row gets the
    value if its index is the index to which the value is scattered.
    """
    if eqn.primitive.name in SCATTERS:
        return platform != "tpu" or not eqn.params["dimension_numbers"].operand_batching_dims
    if is_random(eqn):
        return platform == "cpu" or "fry" not in str(_jax.aval(eqn.invars[0]).dtype)
    return is_heavy(eqn) or eqn.primitive.name in REDUCTIONS


def _reads_memory(eqn: JaxprEqn, platform: str) -> bool:
    """Tells whether an equation's kernel can only read its operands from memory.

    On a GPU, a kernel that gathers or pools values can also compute them.
    """
    if eqn.primitive.name in ("gather", *POOLS):
        return platform != "cuda"
    return is_heavy(eqn) and eqn.primitive.name not in SCATTERS


def _operations(eqn: JaxprEqn) -> float:
    """Counts the elementwise operations of an equation; a product has flops instead."""
    name = eqn.primitive.name
    if name in _ALIASES or (is_heavy(eqn) and flops(eqn)):
        return 0.0
    looped = eqn.invars if name in (*REDUCTIONS, "sort") else eqn.outvars
    size = max((math.prod(_jax.aval(v).shape) for v in looped), default=0)
    if is_random(eqn) or name == "threefry2x32":
        return _RANDOM_OPERATIONS * size
    if name == "sort":
        return size * math.log2(max(size, 2))
    return _OPERATIONS.get(name, 1.0) * size


def _kernel_seconds(eqn: JaxprEqn, kernel: Kernel, device: Accelerator) -> float:
    """Estimates the seconds of an equation's kernel."""
    if bodies := _jax.inner_jaxprs(eqn):
        return device.launch_s + _loop_seconds(eqn, bodies, device)
    work = flops(eqn)
    passes = 1.0 if work else device.framework.passes
    moved = sum(kernel.reads.values()) + kernel.written
    elementwise_s = kernel.operations / device.elementwise_per_s
    moving_s = moved * passes / device.memory_bytes_per_s
    return device.launch_s + max(_product_seconds(eqn, work, device), elementwise_s, moving_s)


def _product_seconds(eqn: JaxprEqn, work: int, device: Accelerator) -> float:
    """Estimates the seconds of a product of `work` flops, by tiles if the device has a tiling."""
    if not work:
        return 0.0
    dtype = _jax.aval(eqn.invars[0]).dtype
    rate = device.products_per_s(str(dtype))
    product = product_of(eqn)
    if device.tiling is None or product is None or not device.cores:
        return work / rate
    return product_s(product, device.tiling, device.cores, rate, device.memory_bytes_per_s)


def _loop_seconds(eqn: JaxprEqn, bodies: Sequence[Jaxpr], device: Accelerator) -> float:
    """Estimates the seconds of an equation that contains jaxprs, its bodies.

    The body of a scan counts once per round. The bodies of a while loop count once, because
    the number of rounds is unknown. The longest branch of a cond counts, the others do not.
    """
    body_seconds = [sum(equation_seconds(body.eqns, body.outvars, device), 0.0) for body in bodies]
    if eqn.primitive.name == "cond":
        return max(body_seconds)
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return sum(body_seconds, 0.0) * times
