"""The bytes that a program holds beside its inputs and results, from its equations alone.

What compilers do with them, seen in what they compile for H100s and TPUs (`experiments/absent_hardware`), stands in
these rules. On CPUs, whose compiler makes one result per kernel, only the first one holds.

    kernels    a value that the roofline has in memory gets a buffer, from its kernel to the last kernel that reads it
    results    what one elementwise kernel makes a result of lies where that will be; a product that is added to a sum
               is added up where the sum lies
    twins      what two equations compute alike is computed once

On a GPU:

    siblings   elementwise kernels over arrays of one shape that read the same array become one, where the last of
               them stands: what they make is there at once
    parts      products whose sums are cut need more while they run: see `split_products`
    turned     a scattered sum that is transposed is copied for the products that read it
    pools      the backward of a maximum over windows finds where each was, in whole numbers: one for each dimension

On a TPU, with the bytes that arrays take in tiles:

    halves     what is made for products alone is bfloat16, for so it multiplies float32; not in batches of products,
               where copies take what this spares
    relaid     an input that elementwise kernels read beside a batch of products is copied, to lie as these do; a
               product of more than 128 rows each with a transposed table is copied where it is a result that kernels
               read, too
    scratch    small buffers lie in the memory beside the cores while there is room
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jvpipe import _jax
from jvpipe._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.products import product_of
from jvpipe.cost.roofline import REDUCTIONS, SCATTERS, Kernels, nbytes
from jvpipe.cost.split_products import split_bytes
from jvpipe.cost.tiles import tiled_bytes
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import merged_equations
from jvpipe.trace.primitives import is_heavy

_SUMMED = ("dot_general", "scatter-add")
"""What these make is added to a sum as they make it."""
_ADDED = ("add", "add_any")
_LANES = 128
_SMALL = 4
"""A small buffer takes less than this part of the memory beside the cores."""


def temporary_bytes(closed: ClosedJaxpr, device: Accelerator) -> int:
    """Counts the most that a program holds in memory beside its inputs and results.

    Args:
        closed: the program.
        device: that would run it.

    >>> import jax, jax.numpy as jnp
    >>> from jvpipe.cost.presets import H100
    >>> square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> temporary_bytes(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w) @ w)(square, square), H100) / 2**20
    0.5
    """
    jaxpr = merged_equations(closed).jaxpr
    if device.platform != "cpu":
        jaxpr = _without_twins(jaxpr)
    kernels = Kernels(jaxpr.eqns, jaxpr.outvars, device.platform)
    elsewhere = {kernels.root.get(v, v) for v in jaxprs.variables(jaxpr.outvars)}
    size = nbytes
    steps = list(_steps(jaxpr, kernels, device))
    if device.platform != "cpu":
        elsewhere |= _inside_results(jaxpr, kernels)
    if device.platform == "cuda":
        steps = _with_siblings(steps)
    if device.platform == "tpu":
        elsewhere -= _laid_twice(jaxpr, kernels)
        steps = _with_relaid(steps, _relaid(jaxpr))
        size = partial(_tpu_bytes, halves=_halves(jaxpr, kernels))
    last = {v: i for i, step in enumerate(steps) for v in step.reads}
    alive, peak = Counter[bool](), 0  # what is small and what is not
    ending: dict[int, Counter[bool]] = {}
    for i, step in enumerate(steps):
        for v in step.writes - elsewhere:
            made = Counter({size(v) < device.scratch_bytes // _SMALL: size(v)})
            alive += made
            ending[last.get(v, i)] = ending.get(last.get(v, i), Counter()) + made
        beside = max(0, alive[True] - device.scratch_bytes)
        peak = max(peak, alive[False] + beside + step.own_bytes)
        alive -= ending.get(i, Counter())
    return peak


def _without_twins(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr in which no equation computes what one before it has computed; its results stay as they are."""
    results = {*jaxprs.variables(jaxpr.outvars)}
    first: dict[Hashable, JaxprEqn] = {}
    same: dict[Atom, Atom] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        read = [same.get(a, a) if isinstance(a, Var) else a for a in eqn.invars]
        eqn = eqn.replace(invars=read)
        key = _what_it_computes(eqn)
        twin = first.setdefault(key, eqn) if key is not None else eqn
        if twin is eqn or not results.isdisjoint(eqn.outvars):
            eqns.append(eqn)
        else:
            same |= zip(eqn.outvars, twin.outvars, strict=True)
    return jaxpr.replace(eqns=eqns)


def _what_it_computes(eqn: JaxprEqn) -> Hashable | None:
    """What is equal for equations with equal results; None where that is not known, and of barriers."""
    if eqn.effects or _jax.inner_jaxprs(eqn) or eqn.primitive.name == "optimization_barrier":
        return None
    read = [a if isinstance(a, Var) else (str(a.val), str(a.aval)) for a in eqn.invars]
    params = tuple((name, repr(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive, tuple(read), params


@dataclass(frozen=True)
class _Step:
    """A kernel, or siblings: what it reads and writes, and the shape that it loops over (None: it is a product).

    `own_bytes` are there while it runs.
    """

    reads: frozenset[Var]
    writes: frozenset[Var]
    loop: tuple[int, ...] | None
    own_bytes: int = 0


def _steps(jaxpr: Jaxpr, kernels: Kernels, device: Accelerator) -> Iterator[_Step]:
    turned = _turned_scatters(jaxpr, kernels) if device.platform == "cuda" else set[Var]()
    for i, kernel in kernels.of.items():
        eqn = jaxpr.eqns[i]
        outputs = kernels.written.intersection(eqn.outvars)
        own_bytes = _own_bytes(eqn, device)
        if eqn.primitive.name == "dot_general":
            own_bytes += sum(map(nbytes, turned.intersection(kernel.reads)))
        yield _Step(frozenset(kernel.reads), frozenset(outputs), _loop(eqn), own_bytes)


def _turned_scatters(jaxpr: Jaxpr, kernels: Kernels) -> set[Var]:
    """The scattered sums that are transposed: they lie as what they are added to, so that is a copy."""
    turned = {
        kernels.root.get(v, v)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "transpose"
        for v in jaxprs.variables(eqn.invars)
    }
    return {v for eqn in jaxpr.eqns if eqn.primitive.name in SCATTERS for v in eqn.outvars} & turned


def _own_bytes(eqn: JaxprEqn, device: Accelerator) -> int:
    """Counts what a kernel of a GPU needs for itself."""
    name = eqn.primitive.name
    if name == "dot_general" and device.cores and (product := product_of(eqn)):
        return split_bytes(product, device.cores)
    if name == "select_and_scatter_add" and device.platform == "cuda":
        pooled = eqn.invars[0]
        return (1 + len(_jax.aval(pooled).shape)) * nbytes(pooled)
    return 0


def _loop(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """The shape that an elementwise kernel, or a reduction, loops over; None for any other."""
    if is_heavy(eqn) or eqn.primitive.name in SCATTERS:
        return None
    over = eqn.invars[0] if eqn.primitive.name in REDUCTIONS else eqn.outvars[0]
    return _jax.aval(over).shape


def _inside_results(jaxpr: Jaxpr, kernels: Kernels) -> set[Var]:
    """The values that lie where a result will: one elementwise kernel reads them and makes that result of them.

    Where it adds to an input that the result overwrites, products and scattered sums alone do without a buffer.
    """
    results = {kernels.root.get(v, v) for v in jaxprs.variables(jaxpr.outvars)}
    summed = {v for eqn in jaxpr.eqns if eqn.primitive.name in _SUMMED for v in eqn.outvars}
    readers = Counter(v for kernel in kernels.of.values() for v in kernel.reads)
    inputs = set(jaxpr.invars)
    inside: set[Var] = set()
    for i, kernel in kernels.of.items():
        eqn = jaxpr.eqns[i]
        reduces = _loop(eqn) is None or eqn.primitive.name in REDUCTIONS
        if reduces or results.isdisjoint(eqn.outvars):
            continue
        alike = {v for v in kernel.reads if nbytes(v) == nbytes(eqn.outvars[0])}
        alone = {v for v in kernel.reads if v in alike and readers[v] == 1} - {*jaxpr.invars}
        inside |= alone & summed
        # Of what is not a sum one alone lies there, and none where an input is added to: it is overwritten.
        if not (eqn.primitive.name in _ADDED and inputs.intersection(jaxprs.variables(eqn.invars))):
            inside |= set(list(alone - summed)[:1])
    return inside


def _batched(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0])


def _halves(jaxpr: Jaxpr, kernels: Kernels) -> set[Var]:
    """The values of float32 that elementwise kernels make for products alone, none of which is one of a batch.

    Reductions of them run where they are made.
    """
    made = {
        v for i in kernels.of if _loop(jaxpr.eqns[i]) is not None for v in jaxpr.eqns[i].outvars
    }
    others = {
        v
        for i, kernel in kernels.of.items()
        if jaxpr.eqns[i].primitive.name not in ("dot_general", *REDUCTIONS)
        or _batched(jaxpr.eqns[i])
        for v in kernel.reads
    }
    return {v for v in made - others if _jax.aval(v).dtype == "float32"}


def _relaid(jaxpr: Jaxpr) -> set[Var]:
    """The inputs that lie beside results of batches of products: as large as one of them, and elementwise of use."""
    shapes = {_jax.aval(eqn.outvars[0]).shape for eqn in jaxpr.eqns if _batched(eqn)}
    operands = {v for eqn in jaxpr.eqns if is_heavy(eqn) for v in jaxprs.variables(eqn.invars)}
    return {v for v in jaxpr.invars if _jax.aval(v).shape in shapes} - operands


def _laid_twice(jaxpr: Jaxpr, kernels: Kernels) -> set[Var]:
    """The products with a transposed table that are results, of which kernels read a copy that lies otherwise."""
    turned = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "transpose"}
    read = {v for kernel in kernels.of.values() for v in kernel.reads}
    return {
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "dot_general"
        and not _batched(eqn)
        and not turned.isdisjoint(jaxprs.variables(eqn.invars))
        and eqn.outvars[0] in read
        and _jax.aval(eqn.outvars[0]).shape[-2:][0] > _LANES
    }


def _with_relaid(steps: Sequence[_Step], relaid: set[Var]) -> list[_Step]:
    """The steps, the first of which that reads an input that is relaid makes its copy."""
    marked, left = [], set(relaid)
    for step in steps:
        marked.append(replace(step, writes=step.writes | (step.reads & left)))
        left -= step.reads
    return marked


def _tpu_bytes(v: Var, halves: set[Var]) -> int:
    aval = _jax.aval(v)
    return tiled_bytes(aval.shape, aval.dtype.itemsize // (2 if v in halves else 1))


def _with_siblings(steps: Sequence[_Step]) -> list[_Step]:
    """The steps with siblings as one, each as near to where its last one stands as what it reads allows."""
    maker = {v: i for i, step in enumerate(steps) for v in step.writes}
    behind = [0] * len(steps)  # bits: all the steps that one cannot run before
    for i, step in enumerate(steps):
        for j in {maker[v] for v in step.reads if v in maker}:
            behind[i] |= behind[j] | 1 << j
    alike: dict[tuple[int, ...] | None, list[list[int]]] = {}  # groups, by what they loop over
    for i, step in enumerate(steps):
        groups = alike.setdefault(step.loop, [])
        for group in groups if step.loop is not None else ():
            bits = sum(1 << j for j in group)
            waits = behind[i] & bits or behind[group[0]] >> i & 1
            if not waits and any(_share(step, steps[j]) for j in group):
                group.append(i)
                _join(behind, bits | 1 << i)
                break
        else:
            groups.append([i])
    every = [group for groups in alike.values() for group in groups]
    return [_joined([steps[j] for j in group]) for group in _in_order(every, behind)]


def _share(a: _Step, b: _Step) -> bool:
    """Tells whether two steps over arrays of one shape read the same one of them."""
    return any(_jax.aval(v).size >= math.prod(a.loop or ()) for v in a.reads & b.reads)


def _join(behind: list[int], group: int) -> None:
    """Makes of steps (bits) one: who waits for one of them waits for all, and they for what any waits for."""
    needs = 0
    for k, waits in enumerate(behind):
        needs |= waits if group >> k & 1 else 0
    for k, waits in enumerate(behind):
        if group >> k & 1:
            behind[k] = needs
        elif waits & group:
            behind[k] |= needs | group


def _in_order(groups: Sequence[list[int]], behind: Sequence[int]) -> Iterator[list[int]]:
    """Yields groups of steps by where the last of each stands, none before what it needs."""
    todo, done = sorted(groups, key=max), 0
    while todo:
        ready = next(group for group in todo if not behind[group[0]] & ~done)
        todo.remove(ready)
        done |= sum(1 << j for j in ready)
        yield ready


def _joined(several: Sequence[_Step]) -> _Step:
    return _Step(
        frozenset(v for step in several for v in step.reads),
        frozenset(v for step in several for v in step.writes),
        several[0].loop,
        sum(step.own_bytes for step in several),
    )
