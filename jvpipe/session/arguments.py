"""Checks of what a user gives: devices, batches, the optimizer."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jvpipe._jax import Device, Tracer
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.programs.optimizer import OptimizerCut, cut_optimizer
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.trace.keys import is_key
from jvpipe.trace.leaves import Role, abstract, canonical, path_name

Tree = Any
_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


def whole_number(name: str, value: Any) -> int:
    """A number of Python or NumPy, as one of Python."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        cuts = "; for layers per stage write jvpipe.Plan.from_cuts([2, 2])" if isinstance(value, (list, tuple)) else ""
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}{cuts}")
    return int(value)


def checked_name(name: str, value: Any, usual: str) -> str:
    """A name, known or not.

    Args:
        name: of the option.
        value: what was given.
        usual: a name for the message to suggest.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a name such as '{usual}', not {_kind(value)}{_uncalled(value)}")
    return value


def checked_schedule(schedule: Any) -> Schedule:
    """A schedule, by its name or as it is."""
    return find_schedule(schedule if isinstance(schedule, Schedule) else checked_name("schedule", schedule, "1f1b"))


def checked_fates(fates: Any) -> dict[str, str]:
    """Fates by patterns."""
    if not isinstance(fates or {}, Mapping) or not all(isinstance(name, str) for name in fates or {}):
        raise ValueError(f"fates must map names of tensors, such as {{'*/attention/*': 'swap'}}, not {fates!r}")
    return dict(fates or {})


def checked_flags(**flags: Any) -> None:
    """Options that are on or off."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")


def checked_devices(devices: Any) -> list[Device]:
    """The devices that are given, or all."""
    given = (
        list(jax.devices() if devices is None else devices)
        if devices is None or isinstance(devices, Iterable)
        else None
    )
    if not given or not all(hasattr(device, "addressable_memories") for device in given):
        raise ValueError(
            "devices must be a list of JAX devices, one per stage, such as [jax.devices()[i] for i in (0, 1)], not "
            f"{devices!r}"
        )
    return given


def check_loss(loss_fn: Any, *, has_state: bool) -> None:
    """Raises ValueError if a loss cannot be called as it will be."""
    names = ("params", "model_state", "batch", "rng") if has_state else ("params", "batch", "rng")
    if not callable(loss_fn):
        raise ValueError(f"the loss must be a function of ({', '.join(names)}), not {_kind(loss_fn)}")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # one that Python cannot look into
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        called = ", ".join(names)
        raise ValueError(
            f"the loss {_called(loss_fn)}{signature} is called with ({called}), has_state={has_state}: {error}; "
            f"wrap it, lambda {called}: ..."
        ) from error


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what is no optax transformation."""
    if isinstance(optimizer, type) or not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(f"the optimizer must be an optax transformation, not {_kind(optimizer)}{_uncalled(optimizer)}")


def check_key(rng: Any) -> None:
    """Raises ValueError for what is no random key, of the new kind or the old."""
    cure = f": write jax.random.key({rng})" if isinstance(rng, (int, np.integer)) else ", such as jax.random.key(0)"
    if not isinstance(rng, (jax.Array, np.ndarray)):
        raise ValueError(f"rng must be a random key, not {_kind(rng)}{cure}")
    shape = () if is_key(rng) else jax.eval_shape(jax.random.PRNGKey, 0).shape
    if rng.shape != shape or (not is_key(rng) and rng.dtype != np.uint32):
        raise ValueError(f"rng must be one random key, not {rng.dtype}{list(rng.shape)}{cure}")


def check_arrays(tree: Tree, role: Role) -> None:
    """Raises ValueError for leaves that are shapes alone, or arrays whose buffers are gone."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"{role} '{path_name(path)}' is a shape: give an array")
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(f"{role} '{path_name(path)}' was deleted or donated: give an array that is still there")


def _kind(value: Any) -> str:
    if isinstance(value, (str, int, float, type(None))):
        return repr(value)
    if callable(value) and hasattr(value, "__name__"):
        return f"{'the class' if isinstance(value, type) else 'the function'} {value.__name__}"
    return f"a {type(value).__name__}"


def _uncalled(value: Any) -> str:
    return f": call it, {_called(value)}(...)" if callable(value) and hasattr(value, "__name__") else ""


def _called(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def place_stages(stages: int | Plan, devices: Sequence[Device] | None) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The distinct devices, and the index of each stage's device among them.

    Devices that are given stay, used or not: a later plan may have more stages.
    """
    given = checked_devices(devices)
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
    limits = [stat["bytes_limit"] for stat in stats if stat and "bytes_limit" in stat]
    return min(limits, default=None)


def batch_shapes(batch: Tree) -> Any:
    """The key of a traced batch: its tree, and the shapes and types that its leaves have on a device."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((np.shape(leaf), canonical(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)


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

    batch = abstract(batch, "batch leaf")
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("the batch holds no arrays")
    sizes = {path_name(path): np.shape(leaf)[:1] for path, leaf in leaves}
    if scalars := [name for name, size in sizes.items() if not size]:
        raise ValueError(
            f"batch leaf '{scalars[0]}' is a scalar: every leaf needs a leading batch axis, so let the loss capture "
            "it, or repeat it for every example; make one array of a list of numbers, np.asarray(numbers)"
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the leaves of the batch differ in their leading axis: {sizes}")
    return jax.tree_util.tree_map_with_path(part, batch)


def feeds_of(
    batch: Tree, words: np.ndarray | None, step: int, microbatches: int
) -> dict[tuple[str, int], Sequence[np.ndarray | jax.Array]]:
    """Slices what the micro-batches of a step read from the host, by (kind, index).

    Args:
        batch: a whole one.
        words: those of the run's key, if it has one.
        step: the number of the step.
        microbatches: how many the batch is split into.
    """
    feeds: dict[tuple[str, int], Sequence[np.ndarray | jax.Array]] = {}
    for i, leaf in enumerate(map(_feedable, jax.tree.leaves(batch))):
        size = len(leaf) // microbatches
        feeds["batch", i] = [leaf[m * size : (m + 1) * size] for m in range(microbatches)]
    if words is not None:
        feeds["seed", 0] = [np.array([*words.ravel(), step, m], np.uint32) for m in range(microbatches)]
    return feeds


def _feedable(leaf: Any) -> Any:
    """A leaf of the batch as an array of the type that it has on a device.

    The host knows no keys; of types smaller than a byte, whoever compiles ahead takes no array but JAX's own.
    """
    if is_key(leaf) or leaf.dtype.name in _PACKED:
        return jax.numpy.asarray(leaf)
    return np.asarray(leaf).astype(canonical(leaf.dtype), copy=False)


def _nearest_divisors(size: int, wanted: int) -> str:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    divisors = sorted({*small, *(size // n for n in small)})
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
    """Cuts the optimizer into pieces, for the updates of a schedule.

    Args:
        optimizer: any optax transformation.
        graph: the layers that own the parameters.
        params: their tree, split into layers.
        microbatches: of a step.
        schedule: says how many of them an update takes.
        grad_norm: also compute the gradient's norm.

    Raises:
        ValueError: it needs a value of all layers at once, and the schedule updates them at different times.
    """
    cut = cut_optimizer(
        optimizer,
        abstract(params),
        [p.owner for p in graph.parameters],
        [len(p.readers) for p in graph.parameters],
        microbatches=None if graph.weighted else schedule.period(microbatches),
        grad_norm=grad_norm,
    )
    if not schedule.synchronous and (cut.cross_layer or grad_norm):
        name = " and ".join(cut.cross_layer) or "grad_norm=True"
        raise ValueError(
            f"{name} needs a value of all layers at once, which {schedule.name} does not have: its layers are updated "
            "at different times. Use a synchronous schedule (1f1b), or what looks at one parameter at a time, such as "
            "optax.adaptive_grad_clip or optax.clip"
        )
    return cut
