"""What a user gives, checked: devices, batches, the optimizer."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from jvpipe._jax import Device
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.programs.optimizer import OptimizerCut, cut_optimizer
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.loss import abstract, path_name

Tree = Any


def place_stages(stages: int | Plan, devices: Sequence[Device] | None) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The distinct devices, and the index of each stage's device among them.

    Devices that are given stay, used or not: a later plan may have more stages.
    """
    given = list(jax.devices() if devices is None else devices)
    distinct = tuple(dict.fromkeys(given))
    if isinstance(stages, Plan):
        return distinct, ()
    if stages > len(given):
        raise ValueError(
            f"{stages} stages need {stages} devices, there are {len(given)}: use at most {len(given)} stages, "
            "or share devices by naming them more than once in devices="
        )
    used = tuple(dict.fromkeys(given[:stages])) if devices is None else distinct
    return used, tuple(used.index(d) for d in given[:stages])


def reported_limit(devices: Sequence[Device]) -> int | None:
    """The memory that the smallest of the devices reports; None if they do not (CPUs)."""
    stats = [device.memory_stats() for device in devices]
    limits = [found["bytes_limit"] for found in stats if found and "bytes_limit" in found]
    return min(limits, default=None)


def batch_shapes(batch: Tree) -> Any:
    """What tells one traced batch from another."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves)


def micro_batch_shapes(batch: Tree, microbatches: int) -> Tree:
    """The shapes of one micro-batch."""

    def part(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = np.shape(leaf)
        size = shape[0]
        if size % microbatches or not size:
            near = _nearest_divisors(size, microbatches)
            raise ValueError(
                f"{microbatches} micro-batches do not divide the {size} examples of batch leaf '{path_name(path)}': "
                f"the nearest that do are {near}"
            )
        return jax.ShapeDtypeStruct((size // microbatches, *shape[1:]), leaf.dtype)

    leaves = jax.tree_util.tree_leaves_with_path(abstract(batch))
    if not leaves:
        raise ValueError("the batch holds no arrays")
    sizes = {path_name(path): np.shape(leaf)[:1] for path, leaf in leaves}
    if scalars := [name for name, size in sizes.items() if not size]:
        raise ValueError(f"batch leaf '{scalars[0]}' is a scalar: every leaf needs a leading batch axis")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the leaves of the batch differ in their leading axis: {sizes}")
    return jax.tree_util.tree_map_with_path(part, abstract(batch))


def feeds_of(
    batch: Tree, words: np.ndarray | None, step: int, microbatches: int
) -> dict[tuple[str, int], Sequence[np.ndarray]]:
    """What the micro-batches of a step read from the host, by (kind, index); `words` are those of the run's key."""
    feeds: dict[tuple[str, int], Sequence[np.ndarray]] = {}
    for i, leaf in enumerate(map(np.asarray, jax.tree.leaves(batch))):
        size = len(leaf) // microbatches
        feeds["batch", i] = [leaf[m * size : (m + 1) * size] for m in range(microbatches)]
    if words is not None:
        feeds["seed", 0] = [np.array([*words.ravel(), step, m], np.uint32) for m in range(microbatches)]
    return feeds


def _nearest_divisors(size: int, wanted: int) -> str:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    below, above = [n for n in divisors if n < wanted], [n for n in divisors if n > wanted]
    return " and ".join(map(str, below[-1:] + above[:1])) or "none: the batch is empty"


def cut_for(
    optimizer: optax.GradientTransformation,
    graph: LayerGraph,
    params: Any,
    microbatches: int,
    schedule: Schedule,
    *,
    grad_norm: bool,
) -> OptimizerCut:
    """The optimizer in pieces, for the updates of a schedule.

    Raises:
        ValueError: it needs a value of all layers at once, and the schedule updates them at different times.
    """
    found = cut_optimizer(
        optimizer,
        abstract(params),
        [p.owner for p in graph.parameters],
        [len(p.readers) for p in graph.parameters],
        microbatches=None if graph.weighted else schedule.period(microbatches),
        grad_norm=grad_norm,
    )
    if not schedule.synchronous and (found.cross_layer or grad_norm):
        name = " and ".join(found.cross_layer) or "grad_norm=True"
        raise ValueError(
            f"{name} needs a value of all layers at once, which {schedule.name} does not have: its layers are updated "
            "at different times. Use a synchronous schedule (1f1b), or what looks at one parameter at a time, such as "
            "optax.adaptive_grad_clip or optax.clip"
        )
    return found
