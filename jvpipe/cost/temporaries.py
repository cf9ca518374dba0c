"""The bytes that a program holds beside its inputs and results, counted from its equations alone.

The rules describe what compilers were seen to do in programs for H100s and TPUs
(`experiments/absent_hardware`). A kernel is what one launch computes (`roofline.py`). The compiler
for CPUs makes kernels with one result each, so only the first rule holds there.

    kernels    a value that reaches memory by the roofline's rules has a buffer, which lives from
               the kernel that writes the value to the last kernel that reads it
    results    if one elementwise kernel makes a result of the program from a value, the value lies
               in the result's memory; a product that is added to a sum is summed up in place
    twins      two equations that compute the same value become one
    sums       a reduction of a reduction of the same kind is one kernel
    early      a kernel that writes only results runs right after the kernels that it reads from

On a GPU:

    siblings   elementwise kernels and reductions that loop over one shape and read the same array
               become one kernel, at the place of the last, so all their results exist at once
    lodgers    a buffer lies in a result's memory if its last reader runs before the result's writer
    parts      a product whose sum is cut into parts needs memory for them (`split_products.py`)
    turned     each product that reads a scatter's result in transposed form copies that result
    across     if two reductions of a value go over different axes, two kernels read the value; it
               is written to memory for them if making it takes an exponential or the like
    filters    a convolution of images with channels last copies a filter with channels elsewhere
    pools      the backward of a maximum over windows computes the maxima again, and the position of
               each as one whole number per dimension

On a TPU, where the bytes are those that arrays take in tiles (`tiles.py`):

    halves     float32 values that only unbatched products read are bfloat16, because a TPU
               multiplies float32 as bfloat16; for batches, copies take what this would save
    relaid     an input that elementwise kernels read is copied into the layout of a batch of
               products beside it; or if it lies along another dimension between programs
    twice      a product of at least 128 rows with a transposed table is copied if it is a result
               of the program and also read by kernels
    images     what convolutions read and make has its channels along the 128 columns of tiles, so
               inputs and results with another layout between programs are copied
    scratch    small buffers lie in the memory beside the cores while there is room (`heap.py`)
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.heap import Buffer, Room, peak_bytes, without_lodgers
from jvpipe.cost.products import product_of
from jvpipe.cost.roofline import DEAR, REDUCTIONS, SCATTERS, Kernels, nbytes
from jvpipe.cost.split_products import split_bytes
from jvpipe.cost.tiles import tiled_bytes
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import merged_equations
from jvpipe.trace.normalized import first_of_same
from jvpipe.trace.primitives import is_heavy

_SUMMED = ("dot_general", "scatter-add", "select_and_scatter_add")
"""The primitives whose results can be added to a sum as they are made, without a buffer."""
_PRODUCTS = ("dot_general", "conv_general_dilated")
_ADDED = ("add", "add_any")
_LANES = 128  # the columns of a TPU's tile
Size = Callable[[Var], int]
"""Counts the bytes of a value."""


def temporary_bytes(closed: ClosedJaxpr, device: Accelerator) -> int:
    """Counts the most bytes that a program holds at once beside its inputs and results.

    Walks through the kernels in their order: each kernel adds the values that it writes, and frees
    the values that no later kernel reads.

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
    kernels = Kernels(jaxpr.eqns, jaxpr.outvars, device.platform)
    # Values without a buffer of their own: results, and what lies in a result or inside a kernel.
    elsewhere = _roots(kernels, jaxpr.outvars)
    size = nbytes
    steps = list(_steps(jaxpr, kernels, device))
    if device.platform != "cpu":
        elsewhere |= _inside_results(jaxpr, kernels) | _inner_sums(jaxpr, kernels)
    if device.platform == "cuda":
        steps = _with_siblings(_with_once(steps, _summed_across(jaxpr, kernels)))
    if device.platform == "tpu":
        images = _images(jaxpr)
        elsewhere -= _laid_twice(jaxpr, kernels) | images
        size = partial(_tpu_bytes, halves=_halves(jaxpr, kernels, images), images=images)
        steps = _with_turned(steps, images, size)
        steps = _with_relaid(steps, _relaid(jaxpr) | images.intersection(jaxpr.invars))
    if device.platform != "cpu":
        steps = _with_results_early(steps, elsewhere)
    # A value lives from the first step that writes it to the last one that reads it.
    last = {v: i for i, step in enumerate(steps) for v in step.reads}
    made = {v: i for i, step in reversed([*enumerate(steps)]) for v in step.writes}
    buffers = [Buffer(size(v), i, last.get(v, i)) for v, i in made.items() if v not in elsewhere]
    buffers += [Buffer(step.own_bytes, i, i) for i, step in enumerate(steps)]
    if device.platform == "cuda":
        buffers = without_lodgers(buffers, _rooms(jaxpr, kernels, steps, elsewhere))
    return peak_bytes(buffers, device.scratch_bytes)


def _roots(kernels: Kernels, atoms: Iterable[Atom]) -> set[Var]:
    """Returns the first names of values: the variables before any alias, such as a reshape."""
    return {kernels.root.get(v, v) for v in jaxprs.variables(atoms)}


def _readers(kernels: Kernels) -> Counter[Var]:
    """Counts the kernels that read each value."""
    return Counter(v for kernel in kernels.of.values() for v in kernel.reads)


def _without_twins(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr without equations that repeat an earlier one, unless they make a result."""
    results = {*jaxprs.variables(jaxpr.outvars)}
    # A barrier exists to keep its operands apart, so two equal barriers do not become one.
    firsts = first_of_same(e for e in jaxpr.eqns if e.primitive.name != "optimization_barrier")
    twins = {v for v, first in firsts.items() if v is not first}

    def first_of(atom: Atom) -> Atom:
        return firsts.get(atom, atom) if isinstance(atom, Var) else atom

    eqns = []
    for eqn in jaxpr.eqns:
        is_first = twins.isdisjoint(eqn.outvars)
        is_result = not results.isdisjoint(eqn.outvars)
        if is_first or is_result:
            eqns.append(eqn.replace(invars=[first_of(a) for a in eqn.invars]))
    return jaxpr.replace(eqns=eqns)


@dataclass(frozen=True)
class _Step:
    """A kernel, or several siblings that became one kernel.

    Attributes:
        reads: the values that it reads from memory.
        writes: the values that it writes to memory.
        loop: the shape that it loops over; None for a product or another heavy equation.
        own_bytes: the bytes that it needs while it runs, beside what it reads and writes.
    """

    reads: frozenset[Var]
    writes: frozenset[Var]
    loop: tuple[int, ...] | None
    own_bytes: int = 0


def _steps(jaxpr: Jaxpr, kernels: Kernels, device: Accelerator) -> Iterator[_Step]:
    """Yields a step for each kernel, in the order of equations, with the copies that it makes."""
    turned = _turned_scatters(jaxpr, kernels) if device.platform == "cuda" else set[Var]()
    inputs = {*jaxpr.invars}
    for i, kernel in kernels.of.items():
        eqn = jaxpr.eqns[i]
        outputs = kernels.written.intersection(eqn.outvars)
        own_bytes = _own_bytes(eqn, device)
        if eqn.primitive.name == "dot_general":
            own_bytes += sum(map(nbytes, turned.intersection(kernel.reads)))
        elif device.platform == "cuda" and _copies_filter(eqn):
            filters = inputs & _roots(kernels, eqn.invars[1:])
            own_bytes += sum(map(nbytes, filters))
        yield _Step(frozenset(kernel.reads), frozenset(outputs), _loop(eqn), own_bytes)


def _copies_filter(eqn: JaxprEqn) -> bool:
    """Tells whether a convolution's images have channels last, and its filter has not."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    numbers = eqn.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    channels_last = (0, last, *range(1, last))
    return numbers.lhs_spec == channels_last and numbers.rhs_spec != channels_last


def _summed_across(jaxpr: Jaxpr, kernels: Kernels) -> dict[Var, set[Var]]:
    """Finds values that take an exponential and are reduced over different axes.

    Returns the reductions of each value. Values that reach memory anyway are left out.
    """
    axes: dict[Var, set[tuple[int, ...]]] = {}
    sums: dict[Var, set[Var]] = {}
    dear: set[Var] = set()
    for eqn in jaxpr.eqns:
        read = _roots(kernels, eqn.invars)
        if eqn.primitive.name in REDUCTIONS:
            for v in read:
                # Sums over the same axes are one kernel, which computes the value only once.
                axes.setdefault(v, set()).add(tuple(eqn.params["axes"]))
                sums.setdefault(v, set()).update(eqn.outvars)
        elif (loop := _loop(eqn)) is not None:
            as_large = (_jax.aval(v).shape == loop for v in dear.intersection(read))
            if eqn.primitive.name in DEAR or any(as_large):
                dear.update(eqn.outvars)
    return {v: sums[v] for v in dear - kernels.written if len(axes.get(v, ())) > 1}


def _with_once(steps: Iterable[_Step], once: Mapping[Var, set[Var]]) -> list[_Step]:
    """Returns steps in which the first reduction of each value of `once` also writes the value.

    The later reductions read it from memory.
    """
    marked, missing = [], set(once)
    for step in steps:
        added = {v for v, sums in once.items() if not sums.isdisjoint(step.writes)}
        made = added & missing
        missing -= made
        marked.append(replace(step, writes=step.writes | made, reads=step.reads | (added - made)))
    return marked


def _turned_scatters(jaxpr: Jaxpr, kernels: Kernels) -> set[Var]:
    """Returns the results of scatters that are transposed, which takes a copy.

    A scatter's result has the layout of the array that it updates.
    """
    turned: set[Var] = set()
    scattered: set[Var] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "transpose":
            turned |= _roots(kernels, eqn.invars)
        if eqn.primitive.name in SCATTERS:
            scattered.update(eqn.outvars)
    return scattered & turned


def _own_bytes(eqn: JaxprEqn, device: Accelerator) -> int:
    """Counts the bytes that a GPU's kernel needs beside what it reads and writes."""
    name = eqn.primitive.name
    product = product_of(eqn) if name == "dot_general" and device.cores else None
    if product:
        return split_bytes(product, device.cores)
    if name == "select_and_scatter_add" and device.platform == "cuda":
        pooled = eqn.invars[0]
        return (1 + len(_jax.aval(pooled).shape)) * nbytes(pooled)
    return 0


def _loop(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Returns the shape that an elementwise kernel or a reduction loops over; None for others."""
    if is_heavy(eqn) or eqn.primitive.name in SCATTERS:
        return None
    over = eqn.invars[0] if eqn.primitive.name in REDUCTIONS else eqn.outvars[0]
    return _jax.aval(over).shape


def _inside_results(jaxpr: Jaxpr, kernels: Kernels) -> set[Var]:
    """Finds values that lie in a result's memory, because one elementwise kernel makes it of them.

    If the kernel adds a value to an input, the result overwrites that input. Then only products and
    scattered sums need no buffer, because they are summed up in place.
    """
    results = _roots(kernels, jaxpr.outvars)
    summed = {v for eqn in jaxpr.eqns if eqn.primitive.name in _SUMMED for v in eqn.outvars}
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    readers = _readers(kernels)
    inputs = set(jaxpr.invars)
    inside: set[Var] = set()
    for i, kernel in kernels.of.items():
        eqn = jaxpr.eqns[i]
        is_elementwise = _loop(eqn) is not None and eqn.primitive.name not in REDUCTIONS
        if not is_elementwise or results.isdisjoint(eqn.outvars):
            continue
        result_bytes = nbytes(eqn.outvars[0])
        alike = {v for v in kernel.reads if nbytes(v) == result_bytes}
        alone = {v for v in kernel.reads if v in alike and readers[v] == 1} - inputs
        inside |= alone & summed
        # The result's memory has room for one operand that is not summed up in place. An addition
        # to an input leaves no room, because it overwrites the input.
        reads_input = not inputs.isdisjoint(jaxprs.variables(eqn.invars))
        if not (eqn.primitive.name in _ADDED and reads_input):
            inside |= set(sorted(alone - summed, key=lambda v: made.get(v, -1))[:1])
    return inside


def _inner_sums(jaxpr: Jaxpr, kernels: Kernels) -> set[Var]:
    """Finds the reductions that only a reduction of the same kind reads: both are one kernel."""
    kind = {v: eqn.primitive for eqn in jaxpr.eqns for v in eqn.outvars}
    readers = _readers(kernels)
    reductions = (jaxpr.eqns[i] for i in kernels.of)
    reductions = (eqn for eqn in reductions if eqn.primitive.name in REDUCTIONS)
    read: dict[Var, JaxprEqn] = {}
    for eqn in reductions:
        read |= dict.fromkeys(_roots(kernels, eqn.invars), eqn)
    alone = {v: eqn for v, eqn in read.items() if readers[v] == 1}
    return {v for v, eqn in alone.items() if kind.get(v) is eqn.primitive}


def _rooms(
    jaxpr: Jaxpr,
    kernels: Kernels,
    steps: Sequence[_Step],
    elsewhere: Collection[Var],
) -> Iterator[Room]:
    """Yields the results in whose memory buffers may lie: those that do not overwrite an input.

    A result's memory is in use from the step that first writes the result, or a value in its place.
    """
    results = _roots(kernels, jaxpr.outvars)
    inputs = {*jaxpr.invars}
    for eqn in jaxpr.eqns:
        read = _roots(kernels, eqn.invars)
        if eqn.primitive.name in _ADDED and not inputs.isdisjoint(read):
            results.difference_update(eqn.outvars)
    taken: dict[Var, int] = {}
    for i, step in enumerate(steps):
        inside = [taken[v] for v in step.reads if v in taken]
        for v in step.writes.intersection(elsewhere):
            # A result made from a value that lies in its memory takes the memory with that value.
            taken[v] = min((i, *inside))
            if v in results:
                yield Room(nbytes(v), taken[v])


def _is_batched(eqn: JaxprEqn) -> bool:
    """Tells whether an equation is a batch of matrix products."""
    if eqn.primitive.name != "dot_general":
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return bool(batch)


def _images(jaxpr: Jaxpr) -> set[Var]:
    """Finds the images: values with the layout of convolutions, which takes more bytes.

    Images are what convolutions read and make except filters, and all values of the same shapes.
    """
    shapes: set[tuple[int, ...]] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            left, right, result = (_jax.aval(v).shape for v in (*eqn.invars, *eqn.outvars))
            # Both operands of a filter's gradient are images, and its result is a filter.
            is_gradient = eqn.params["dimension_numbers"].lhs_spec[0] != 0
            # In other convolutions the right operand is the filter.
            shapes |= {left, right if is_gradient else result}
    every = {*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    alike = {v for v in every if _jax.aval(v).shape in shapes}
    return {v for v in alike if _is_wider(_jax.aval(v))}


def _is_wider(aval: Any) -> bool:
    """Tells whether an array takes more than its least bytes with its last dimension as columns."""
    itemsize = aval.dtype.itemsize
    along_columns = tiled_bytes(aval.shape, itemsize, aval.ndim - 1)
    return along_columns > tiled_bytes(aval.shape, itemsize)


def _halves(jaxpr: Jaxpr, kernels: Kernels, images: set[Var]) -> set[Var]:
    """Finds the float32 values that elementwise kernels make and only unbatched products read.

    Reductions may read such a value, too, because they run in the kernel that makes it. Input
    images count as made by elementwise kernels, because they are copied.
    """
    made_in_loops = images.intersection(jaxpr.invars)
    read_by_others: set[Var] = set()
    for i, kernel in kernels.of.items():
        eqn = jaxpr.eqns[i]
        if _loop(eqn) is not None:
            made_in_loops.update(eqn.outvars)
        if eqn.primitive.name not in (*_PRODUCTS, *REDUCTIONS) or _is_batched(eqn):
            read_by_others.update(kernel.reads)
    for_products = made_in_loops - read_by_others
    return {v for v in for_products if _jax.aval(v).dtype == "float32"}


def _relaid(jaxpr: Jaxpr) -> set[Var]:
    """Finds the inputs that are copied for the kernels that loop over them.

    They have the shape of a batched product's result, whose layout they get; or they are rows
    longer than a tile, and lie along another dimension between programs, which takes fewer bytes.
    No heavy equation, such as any product, reads them.
    """
    batched = {_jax.aval(eqn.outvars[0]).shape for eqn in jaxpr.eqns if _is_batched(eqn)}
    operands = {v for eqn in jaxpr.eqns if is_heavy(eqn) for v in jaxprs.variables(eqn.invars)}
    loops = {_loop(eqn) for eqn in jaxpr.eqns}
    avals = {v: _jax.aval(v) for v in jaxpr.invars if v not in operands}
    rows = {v: a for v, a in avals.items() if a.shape[-1:] > (_LANES,) and a.shape in loops}
    turned = {v for v, aval in rows.items() if _is_wider(aval)}
    return turned | {v for v, aval in avals.items() if aval.shape in batched}


def _laid_twice(jaxpr: Jaxpr, kernels: Kernels) -> set[Var]:
    """Finds products that need a buffer even as results: kernels read them in another layout."""
    transposed = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "transpose"}
    read = {v for kernel in kernels.of.values() for v in kernel.reads}
    twice: set[Var] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "dot_general" or _is_batched(eqn):
            continue
        product = eqn.outvars[0]
        has_table = not transposed.isdisjoint(jaxprs.variables(eqn.invars))
        if product not in read or not has_table:
            continue
        # Fewer rows do not fill the columns of tiles, so such a product is not laid out that way.
        rows = _jax.aval(product).shape[-2:][0]
        if rows >= _LANES:
            twice.add(product)
    return twice


def _with_relaid(steps: Sequence[_Step], relaid: set[Var]) -> list[_Step]:
    """Returns steps in which the first reader of each relaid input also writes the input's copy."""
    marked, without_copy = [], set(relaid)
    for step in steps:
        copied = step.reads & without_copy
        marked.append(replace(step, writes=step.writes | copied))
        without_copy -= step.reads
    return marked


def _with_results_early(steps: Sequence[_Step], elsewhere: set[Var]) -> list[_Step]:
    """Moves steps that write only values of `elsewhere` right behind the steps that they need."""
    made_at: dict[Var, int] = {}
    places = []
    for i, step in enumerate(steps):
        needed = [made_at[v] for v in step.reads if v in made_at]
        is_early = needed and step.writes <= elsewhere
        place = max(needed) if is_early else i
        made_at |= dict.fromkeys(step.writes, place)
        places.append(place)
    order = sorted(range(len(steps)), key=places.__getitem__)
    return [steps[i] for i in order]


def _with_turned(steps: Sequence[_Step], images: set[Var], size: Size) -> list[_Step]:
    """Returns steps in which a convolution also holds a copy of its result, examples as rows."""
    turned = [step.writes & images if step.loop is None else () for step in steps]
    result = []
    for step, twice in zip(steps, turned, strict=True):
        copies_bytes = sum(map(size, twice))
        result.append(replace(step, own_bytes=step.own_bytes + copies_bytes))
    return result


def _tpu_bytes(v: Var, halves: set[Var], images: set[Var]) -> int:
    """Counts the bytes of a value in tiles.

    Args:
        v: the value.
        halves: the values with half of the bytes per element.
        images: the values with their channels along the columns.
    """
    aval = _jax.aval(v)
    lanes = aval.ndim - 1 if v in images else None
    itemsize = aval.dtype.itemsize
    return tiled_bytes(aval.shape, itemsize // 2 if v in halves else itemsize, lanes)


def _with_siblings(steps: Sequence[_Step]) -> list[_Step]:
    """Returns steps in which siblings are one step, as late as their last member where possible.

    A step joins the first group that loops over the same shape and reads the same large array. It
    does not join if the step waits for the group or the group for the step, because the joined step
    would wait for itself. So groups form no cycles.
    """
    maker = {v: i for i, step in enumerate(steps) for v in step.writes}
    # For each step the set of all steps that it waits for; binary digit j stands for step j.
    behind = [0] * len(steps)
    for i, step in enumerate(steps):
        for j in {maker[v] for v in step.reads if v in maker}:
            behind[i] |= behind[j] | 1 << j
    groups_over: dict[tuple[int, ...] | None, list[list[int]]] = {}
    for i, step in enumerate(steps):
        groups = groups_over.setdefault(step.loop, [])
        for group in groups if step.loop is not None else ():
            bits = sum(1 << j for j in group)
            waits = behind[i] & bits or behind[group[0]] >> i & 1
            if not waits and any(_share(step, steps[j]) for j in group):
                group.append(i)
                _join(behind, bits | 1 << i)
                break
        else:
            groups.append([i])
    every = [group for groups in groups_over.values() for group in groups]
    in_order = _in_order(every, behind)
    return [_joined([steps[j] for j in group]) for group in in_order]


def _share(a: _Step, b: _Step) -> bool:
    """Tells whether two steps that loop over one shape both read an array of at least that size."""
    least = math.prod(a.loop or ())
    return any(_jax.aval(v).size >= least for v in a.reads & b.reads)


def _join(behind: list[int], group: int) -> None:
    """Joins steps: each then waits for all that any of them needs, and what needs one needs all.

    Args:
        behind: for each step the steps that it waits for, as binary digits; changed in place.
        group: the steps that become one, as binary digits.
    """
    needs = 0
    for k, waits in enumerate(behind):
        needs |= waits if group >> k & 1 else 0
    for k, waits in enumerate(behind):
        if group >> k & 1:
            behind[k] = needs
        elif waits & group:
            behind[k] |= needs | group


def _in_order(groups: Sequence[list[int]], behind: Sequence[int]) -> Iterator[list[int]]:
    """Yields groups of steps by their last members, each after the groups that it needs."""
    todo, done = sorted(groups, key=max), 0
    while todo:
        # One is always ready, because the groups form no cycle.
        ready = next(group for group in todo if not behind[group[0]] & ~done)
        todo.remove(ready)
        done |= sum(1 << j for j in ready)
        yield ready


def _joined(several: Sequence[_Step]) -> _Step:
    """Makes one step of several."""
    reads = frozenset[Var]().union(*(step.reads for step in several))
    writes = frozenset[Var]().union(*(step.writes for step in several))
    own_bytes = sum(step.own_bytes for step in several)
    return _Step(reads, writes, several[0].loop, own_bytes)
