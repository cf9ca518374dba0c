"""The bytes that a program holds beside its inputs and results, from its equations alone.

What compilers do with them, seen in what they compile for H100s and TPUs (`experiments/absent_hardware`), stands in
these rules. Of CPUs, whose compiler makes one result per kernel, the first one alone holds.

    kernels    a value that the roofline has in memory gets a buffer, from its kernel to the last kernel that reads it
    siblings   elementwise kernels over arrays of one shape that read the same array become one, where the last of
               them stands: what they make is there at once
    results    what one elementwise kernel makes a result of lies where that will be; a product that is added to a sum
               is added up where the sum lies
    parts      products whose sums are cut need more while they run: see `split_products`
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jvpipe.cost.hardware import Accelerator
from jvpipe.cost.roofline import REDUCTIONS, SCATTERS, Kernels, nbytes
from jvpipe.cost.split_products import Product
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import merged
from jvpipe.trace.primitives import is_heavy

_SUMMED = ("dot_general", "scatter-add")
"""What these make is added to a sum as they make it."""


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
    jaxpr = merged(closed).jaxpr
    kernels = Kernels(jaxpr.eqns, jaxpr.outvars, device.platform)
    elsewhere = {kernels.root.get(v, v) for v in jaxprs.variables(jaxpr.outvars)}
    steps = list(_steps(jaxpr, kernels, device))
    if device.platform != "cpu":
        elsewhere |= _inside_results(jaxpr, kernels)
        steps = _with_siblings(steps)
    last = {v: i for i, step in enumerate(steps) for v in step.reads}
    alive = most = 0
    ending: Counter[int] = Counter()
    for i, step in enumerate(steps):
        for v in step.writes - elsewhere:
            alive += nbytes(v)
            ending[last.get(v, i)] += nbytes(v)
        most = max(most, alive + step.own_bytes)
        alive -= ending[i]
    return most


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
    for i, kernel in kernels.of.items():
        eqn = jaxpr.eqns[i]
        is_product = eqn.primitive.name == "dot_general" and device.cores
        own_bytes = Product.of(eqn).split_bytes(device.cores) if is_product else 0
        made = kernels.written.intersection(eqn.outvars)
        yield _Step(frozenset(kernel.reads), frozenset(made), _loop(eqn), own_bytes)


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
    inside: set[Var] = set()
    for i, kernel in kernels.of.items():
        eqn = jaxpr.eqns[i]
        reduces = _loop(eqn) is None or eqn.primitive.name in REDUCTIONS
        if reduces or results.isdisjoint(eqn.outvars):
            continue
        alike = {v for v in kernel.reads if nbytes(v) == nbytes(eqn.outvars[0])}
        alone = {v for v in alike if readers[v] == 1}
        inside |= alone & summed if not alike.isdisjoint(jaxpr.invars) else alone
    return inside


def _with_siblings(steps: Sequence[_Step]) -> list[_Step]:
    """The steps with siblings as one, each as near to where its last one stands as what it reads allows."""
    maker = {v: i for i, step in enumerate(steps) for v in step.writes}
    behind = [0] * len(steps)  # bits: all the steps that one cannot run before
    for i, step in enumerate(steps):
        for j in {maker[v] for v in step.reads if v in maker}:
            behind[i] |= behind[j] | 1 << j
    groups: list[int] = []  # bits, too
    for i, step in enumerate(steps):
        for g, group in enumerate(groups):
            members = [j for j in range(i) if group >> j & 1]
            waits = behind[i] & group or any(behind[j] >> i & 1 for j in members)
            if not waits and any(_are_siblings(step, steps[j]) for j in members):
                groups[g] = _join(behind, group | 1 << i)
                break
        else:
            groups.append(1 << i)
    return [_joined(steps, group) for group in _in_order(groups, behind)]


def _are_siblings(a: _Step, b: _Step) -> bool:
    """Tells whether two steps loop over arrays of one shape, and read the same one of them."""
    if a.loop is None or a.loop != b.loop:
        return False
    return any(_jax.aval(v).size >= math.prod(a.loop) for v in a.reads & b.reads)


def _join(behind: list[int], group: int) -> int:
    """Makes of steps (bits) one: who waits for one of them waits for all, and they for what any waits for."""
    needs = 0
    for j in _members(group):
        needs |= behind[j]
    for k, waits in enumerate(behind):
        if group >> k & 1:
            behind[k] = needs
        elif waits & group:
            behind[k] |= needs | group
    return group


def _in_order(groups: Sequence[int], behind: Sequence[int]) -> Iterator[int]:
    """Yields groups of steps (bits) by where the last of each stands, none before what it needs."""
    todo, done = sorted(groups), 0
    while todo:
        ready = next(g for g in todo if not behind[g.bit_length() - 1] & ~done)
        todo.remove(ready)
        done |= ready
        yield ready


def _joined(steps: Sequence[_Step], group: int) -> _Step:
    several = [steps[j] for j in _members(group)]
    return _Step(
        frozenset(v for step in several for v in step.reads),
        frozenset(v for step in several for v in step.writes),
        several[0].loop,
        sum(step.own_bytes for step in several),
    )


def _members(group: int) -> list[int]:
    return [j for j in range(group.bit_length()) if group >> j & 1]
