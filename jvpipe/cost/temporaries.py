"""Counts the bytes that a program holds besides inputs and results, from its equations alone.

The rules describe what compilers were seen to do in programs for H100s and TPUs
(`experiments/absent_hardware`). A kernel is what one launch computes (`roofline.py`). On
CPUs only the first rule holds.

    kernels    a value that reaches memory by the roofline's rules has a buffer, which lives from
               the kernel that writes the value to the last kernel that reads it
    results    if an elementwise kernel makes a result of the program from an equally large value
               that no other kernel reads, the value lies in the result's memory; a product that is
               added to an input is summed up in place
    twins      two equations that compute the same value become one
    sums       a reduction that alone reads the result of another reduction of its kind is computed
               in the same kernel
    early      a kernel that writes only results runs right after the kernels that it reads from

On a GPU:

    siblings   elementwise kernels and reductions that loop over one shape and read the same array
               become one kernel, at the place of the last, so all their results exist at once
    lodgers    a buffer lies in a result's memory if its last reader runs before the result's writer
    parts      a product whose sum is cut into parts needs memory for them (`split_products.py`)
    turned     each product that reads a scatter's result in transposed form copies that result
    across     if two reductions of a value go over different axes, two kernels read the value; it
               is written to memory for them if making it takes an exponential or the like
    filters    a convolution of images with channels last copies its filter if the filter is an
               input of the program and has its channels elsewhere
    pools      the backward of a maximum over windows computes the maxima again, and the position of
               each as one whole number per dimension

On a TPU, where the bytes are those that arrays take in tiles (`tiles.py`):

    halves     float32 values that only unbatched products read are bfloat16, because a TPU
               multiplies float32 as bfloat16; what a batched product reads counts as float32,
               because the product's copies take as many bytes as bfloat16 would save
    relaid     an input that elementwise kernels read is copied in two cases: it has the shape of a
               batch of products, or another layout between programs (`tpu_layouts.py`)
    twice      a product of at least 128 rows with a transposed operand, such as an embedding table,
               is copied if it is a result of the program and kernels read it, too
    images     images that convolutions read or make have channels along the 128 columns of tiles;
               an input or result that is an image is copied if its layout between programs differs
    scratch    small buffers lie in the on-chip memory while there is room (`heap.py`)
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.heap import HeapBlock, Room, peak_bytes, without_lodgers
from jvpipe.cost.kernel_steps import KernelProgram, KernelStep, Shape, dims_of, loop_of
from jvpipe.cost.matrix_products import product_of
from jvpipe.cost.roofline import DEAR, REDUCTIONS, SCATTERS
from jvpipe.cost.siblings import with_siblings
from jvpipe.cost.split_products import split_bytes
from jvpipe.cost.tpu_layouts import TpuLayouts
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import merged_equations
from jvpipe.trace.normalized import first_of_same

_SUMMED = ("dot_general", "scatter-add", "select_and_scatter_add")
"""The primitives whose results can be added to a sum as they are made, without a buffer."""
_ADDED = ("add", "add_any")


def temporary_bytes(closed: ClosedJaxpr, device: Accelerator) -> int:
    """Counts the most bytes that a program holds at once besides its inputs and results.

    The program becomes a list of steps, one for each kernel. The rules of the device's
    compiler change this list. A value then has a buffer from the first step that writes it
    to the last step that reads it.

    Args:
        closed: the program.
        device: the device that would run the program.

    >>> import jax, jax.numpy as jnp
    >>> from jvpipe.cost.presets import H100
    >>> square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> temporary_bytes(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w) @ w)(square, square), H100) / 2**20
    0.25
    """
    jaxpr = merged_equations(closed).jaxpr
    if device.platform != "cpu":
        jaxpr = _without_twins(jaxpr)
    program = KernelProgram(jaxpr, device.platform)
    steps = list(_steps(program, device))
    # Values without a buffer: results, and values that lie in a result or exist inside a kernel.
    elsewhere = program.results
    size = jaxprs.bytes_of
    if device.platform != "cpu":
        elsewhere = elsewhere | _inside_results(program) | _inner_sums(program)
    if device.platform == "cuda":
        steps = with_siblings(_with_once(steps, _summed_across(program)))
    if device.platform == "tpu":
        layouts = TpuLayouts(program)
        elsewhere -= layouts.apart
        size = layouts.nbytes
        steps = layouts.with_copies(steps)
    if device.platform != "cpu":
        steps = _with_results_early(steps, elsewhere)
    # For each value, `first` has the first step that writes it, `last` the last that reads it.
    first: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for i, step in reversed([*enumerate(steps)]):
        first |= dict.fromkeys(step.writes, i)
    for i, step in enumerate(steps):
        last |= dict.fromkeys(step.reads, i)
    buffers = [
        HeapBlock(size(v), begin, last.get(v, begin))
        for v, begin in first.items()
        if v not in elsewhere
    ]
    buffers += (HeapBlock(step.own_bytes, i, i) for i, step in enumerate(steps))
    if device.platform == "cuda":
        buffers = without_lodgers(buffers, _rooms(program, steps, elsewhere))
    return peak_bytes(buffers, device.scratch_bytes)


def _without_twins(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr without equations that repeat an earlier one, unless they make a result."""
    results = {*jaxprs.variables(jaxpr.outvars)}
    # A barrier exists to keep its operands apart, so two equal barriers do not become one.
    firsts = first_of_same(e for e in jaxpr.eqns if e.primitive.name != "optimization_barrier")
    twins = {v for v, first in firsts.items() if v is not first}

    def first_of(atom: Atom) -> Atom:
        return firsts.get(atom, atom) if isinstance(atom, Var) else atom

    eqns = [
        eqn.replace(invars=list(map(first_of, eqn.invars)))
        for eqn in jaxpr.eqns
        if twins.isdisjoint(eqn.outvars) or not results.isdisjoint(eqn.outvars)
    ]
    return jaxpr.replace(eqns=eqns)


def _steps(program: KernelProgram, device: Accelerator) -> Iterator[KernelStep]:
    """Yields a step for each kernel, in the order of equations, with the copies that it makes."""
    turned = _turned_scatters(program) if device.platform == "cuda" else set[Var]()
    for eqn, kernel in program.with_kernels():
        writes = program.written.intersection(eqn.outvars)
        copied = set[Var]()
        if eqn.primitive.name == "dot_general":
            copied = turned.intersection(kernel.reads)
        elif device.platform == "cuda" and _copies_filter(eqn):
            copied = program.inputs & program.roots(eqn.invars[1:])
        own_bytes = _own_bytes(eqn, device) + sum(map(jaxprs.bytes_of, copied))
        yield KernelStep(frozenset(kernel.reads), frozenset(writes), loop_of(eqn), own_bytes)


def _turned_scatters(program: KernelProgram) -> set[Var]:
    """Finds the results of scatters that are transposed.

    A scatter's result has the layout of the array that it updates. So a product that reads the
    result in transposed form needs a copy in another layout.
    """
    operands = (v for eqn in program.named("transpose") for v in eqn.invars)
    return jaxprs.defined(program.named(*SCATTERS)) & program.roots(operands)


def _copies_filter(eqn: JaxprEqn) -> bool:
    """Tells whether an equation convolves images with channels last by a filter of other layout."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    numbers = eqn.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    channels_last = (0, last, *range(1, last))
    return numbers.lhs_spec == channels_last and numbers.rhs_spec != channels_last


def _own_bytes(eqn: JaxprEqn, device: Accelerator) -> int:
    """Counts the bytes that a GPU's kernel needs besides what it reads and writes."""
    name = eqn.primitive.name
    product = product_of(eqn) if name == "dot_general" and device.cores else None
    if product:
        return split_bytes(product, device.cores)
    if name == "select_and_scatter_add" and device.platform == "cuda":
        pooled = eqn.invars[0]
        return (1 + len(dims_of(pooled))) * jaxprs.bytes_of(pooled)
    return 0


def _summed_across(program: KernelProgram) -> dict[Var, set[Var]]:
    """Finds values made with an exponential or the like, and reduced over different axes.

    Returns the reductions of each value. Values that reach memory anyway are left out.
    """
    # For each value and each reduction of this value, the axes of the reduction.
    axes: defaultdict[Var, dict[Var, Shape]] = defaultdict(dict)
    dear: set[Var] = set()
    for eqn in program.eqns:
        name = eqn.primitive.name
        read = program.roots(eqn.invars)
        loop = loop_of(eqn)
        # A value is also expensive if an expensive value of the same shape is needed to make it.
        as_large = (dims_of(v) == loop for v in dear & read)
        if name in REDUCTIONS:
            for v in read:
                axes[v][eqn.outvars[0]] = tuple(eqn.params["axes"])
        elif loop is not None and (name in DEAR or any(as_large)):
            dear.update(eqn.outvars)
    # Reductions over the same axes are one kernel, which computes the value only once.
    return {v: {*axes[v]} for v in dear - program.written if len({*axes[v].values()}) > 1}


def _with_once(steps: Iterable[KernelStep], once: Mapping[Var, set[Var]]) -> list[KernelStep]:
    """Returns steps in which the first reduction of each value of `once` also writes the value.

    The later reductions read it from memory.
    """
    marked = []
    missing = set(once)
    for step in steps:
        reduced = {v for v, sums in once.items() if not sums.isdisjoint(step.writes)}
        written = reduced & missing
        missing -= written
        reads = step.reads | (reduced - written)
        marked.append(replace(step, writes=step.writes | written, reads=reads))
    return marked


def _inside_results(program: KernelProgram) -> set[Var]:
    """Finds the values that lie in a result's memory by the rule `results`.

    If the kernel adds a value to an input, the result overwrites that input. In this case, only
    products and scattered sums need no buffer, because they are summed up in place.
    """
    summed = jaxprs.defined(program.named(*_SUMMED))
    made_by = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
    inside: set[Var] = set()
    for eqn, kernel in program.with_kernels():
        name = eqn.primitive.name
        is_elementwise = loop_of(eqn) is not None and name not in REDUCTIONS
        if not is_elementwise or program.results.isdisjoint(eqn.outvars):
            continue
        result_bytes = jaxprs.bytes_of(eqn.outvars[0])
        alike = {v for v in kernel.reads if jaxprs.bytes_of(v) == result_bytes}
        alone = {v for v in alike - program.inputs if program.readers[v] == 1}
        if name in _ADDED and not program.inputs.isdisjoint(jaxprs.variables(eqn.invars)):
            inside |= alone & summed
        else:
            # The result's memory has room for one operand: the one that is made first.
            inside.update(sorted(alone, key=lambda v: made_by.get(v, -1))[:1])
    return inside


def _inner_sums(program: KernelProgram) -> set[Var]:
    """Finds the results of reductions that only one reduction of the same kind reads."""
    kinds = {v: eqn.primitive for eqn in program.eqns for v in eqn.outvars}
    inner: set[Var] = set()
    for eqn in program.named(*REDUCTIONS):
        alike = {v for v in program.roots(eqn.invars) if kinds.get(v) is eqn.primitive}
        inner |= {v for v in alike if program.readers[v] == 1}
    return inner


def _rooms(
    program: KernelProgram,
    steps: Sequence[KernelStep],
    elsewhere: Collection[Var],
) -> Iterator[Room]:
    """Yields the results in whose memory buffers may lie: those that do not overwrite an input.

    A result's memory is in use from the step that writes the result, or from an earlier step that
    writes a value into that memory.
    """
    free = set(program.results)
    for eqn in program.named(*_ADDED):
        if not program.inputs.isdisjoint(program.roots(eqn.invars)):
            free.difference_update(eqn.outvars)
    taken: dict[Var, int] = {}
    for i, step in enumerate(steps):
        inside = [taken[v] for v in step.reads if v in taken]
        for v in step.writes.intersection(elsewhere):
            # If a result is made from a value in its memory, that value takes the memory first.
            taken[v] = min((i, *inside))
            if v in free:
                yield Room(jaxprs.bytes_of(v), taken[v])


def _with_results_early(steps: Sequence[KernelStep], elsewhere: set[Var]) -> list[KernelStep]:
    """Moves steps that write only values of `elsewhere` to right after the steps they read from."""
    made_at: dict[Var, int] = {}
    placed = []
    for i, step in enumerate(steps):
        needed = [made_at[v] for v in step.reads if v in made_at]
        place = max(needed) if needed and step.writes <= elsewhere else i
        made_at |= dict.fromkeys(step.writes, place)
        placed.append((place, i, step))
    return [step for _, _, step in sorted(placed)]
