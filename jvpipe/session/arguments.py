"""Checks of what a user gives: devices, batches, the optimizer."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import jax
import numpy as np

from jvpipe._jax import Device, Tracer
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import find_planner, shape_planners
from jvpipe.runtime.engine.replicas import check_replicable
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.planned import pipeline_length
from jvpipe.session.trigger import Rule
from jvpipe.trace.keys import is_key
from jvpipe.trace.leaves import Role
from jvpipe.util.brief import brief
from jvpipe.util.given import is_stream, is_whole, several
from jvpipe.util.paths import path_name

Tree = Any
PER_LAYER = "per_layer"
"""The optimizer sees each layer of those that a scan stacks alone."""
USUAL_STAGES, USUAL_MICROBATCHES = 2, 4
"""How many there are unless that is said, in training and in planning alike."""


def whole_number(name: str, value: Any) -> int:
    """A number of Python or NumPy, as one of Python."""
    if not is_whole(value) or value < 1:
        cuts = (
            "; for layers per stage write jvpipe.Plan.from_cuts([2, 2])"
            if isinstance(value, (list, tuple))
            else ""
        )
        raise ValueError(f"{name} must be a whole number of at least 1, not {brief(value)}{cuts}")
    return int(value)


def whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Some numbers, in a sequence or a text.

    >>> whole_numbers("replicas", "2:1"), whole_numbers("cuts", [5, 2])
    ((2, 1), (5, 2))
    """
    parts = re.split("[:,]", value) if isinstance(value, str) else several(value)
    if parts is None:
        raise ValueError(f"{name} must be some whole numbers, such as (2, 1), not {brief(value)}")
    numbers = [
        int(part) if isinstance(part, str) and part.strip().isdecimal() else part for part in parts
    ]
    return tuple(whole_number(f"each of {name}", number) for number in numbers)


def checked_name(name: str, value: Any, usual: str) -> str:
    """A name, known or not.

    Args:
        name: of the option.
        value: what was given.
        usual: a name for the message to suggest.
    """
    if not isinstance(value, str):
        raise ValueError(
            f"{name} must be a name such as '{usual}', not {_kind(value)}{_uncalled(value)}"
        )
    return value


def checked_schedule(schedule: Any) -> Schedule:
    """A schedule, by its name or as it is."""
    return find_schedule(
        schedule if isinstance(schedule, Schedule) else checked_name("schedule", schedule, "1f1b")
    )


def checked_fates(
    fates: Any, name: str = "fates", of: str = "tensors, such as {'*/attention/*': 'swap'}"
) -> dict[str, str]:
    """Fates by patterns.

    Args:
        fates: what was given.
        name: of the option.
        of: what the patterns are for, with an example.
    """
    if fates is None:
        return {}
    if not isinstance(fates, Mapping) or not all(
        isinstance(text, str) for text in (*fates, *fates.values())
    ):
        raise ValueError(f"{name} must map names of {of}, not {brief(fates)}")
    return dict(fates)


def checked_stacked(stacked: Any) -> str | None:
    """What an optimizer sees of stacked layers.

    >>> checked_stacked("per_layer")
    'per_layer'
    """
    if stacked is not None and stacked != PER_LAYER:
        raise ValueError(
            f"stacked must be None (the optimizer sees stacked layers as plain optax does) or '{PER_LAYER}' (it sees "
            f"slices), not {brief(stacked)}"
        )
    return stacked


def checked_devices(devices: Any) -> list[Device]:
    """The devices that are given, or all."""
    given = several(jax.devices() if devices is None else devices)
    if not given or not all(hasattr(device, "addressable_memories") for device in given):
        raise ValueError(
            "devices must be a list of JAX devices, one per stage, such as [jax.devices()[i] for i in (0, 1)], not "
            f"{brief(devices)}"
        )
    return given


def checked_moment(at: Any) -> tuple[int, int] | None:
    """A step and a micro-batch of it, if they are given.

    >>> checked_moment([3, np.int64(1)])
    (3, 1)
    """
    if at is None:
        return None
    numbers = several(at)
    if numbers is None or len(numbers) != 2 or not all(map(is_whole, numbers)):
        raise ValueError(
            f"at must be a step and one of its micro-batches, such as (100, 0), not {brief(at)}"
        )
    return int(numbers[0]), int(numbers[1])


def checked_plan(plan: Any) -> Plan:
    """A plan to move to."""
    if not isinstance(plan, Plan):
        raise ValueError(
            f"migrate needs a jvpipe.Plan, such as Plan.from_cuts([3, 1]), not {brief(plan)}"
        )
    return plan


def checked_rule(rule: Any) -> Rule:
    """A rule of when to move; the usual one unless given."""
    if not isinstance(rule, Rule | None):
        raise ValueError(
            f"rule must be a jvpipe.session.trigger.Rule, such as Rule(gain=0.1), not {brief(rule)}"
        )
    return rule or Rule()


def checked_stream(batches: Any, num_steps: Any) -> Iterator[Any]:
    """Batches one after another: all of a stream, or so many."""
    if isinstance(batches, Mapping) or not is_stream(batches):
        kind = type(batches).__name__
        raise ValueError(f"run takes a stream of batches, such as a list, not one {kind}: use step")
    if num_steps is not None and not (is_whole(num_steps) and num_steps >= 0):
        raise ValueError(f"num_steps must be a whole number of at least 0, not {brief(num_steps)}")
    return islice(batches, num_steps)


def check_loss(loss_fn: Any, *, has_state: bool) -> None:
    """Raises ValueError if a loss cannot be called as it will be."""
    names = ("params", "model_state", "batch", "rng") if has_state else ("params", "batch", "rng")
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise ValueError(
            f"the loss must be a function of ({', '.join(names)}), not {_kind(loss_fn)}"
        )
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


def check_predicted(function: Any, *, has_state: bool) -> None:
    """Raises ValueError for what `predict` cannot call."""
    if not callable(function) or isinstance(function, type):
        given = "params, model_state, batch" if has_state else "params, batch"
        raise ValueError(f"function must be a function of ({given}), not {brief(function)}")


def check_functions(loss_fn: Any, optimizer: Any, *, has_state: bool) -> None:
    """Raises ValueError if a loss cannot be called as it will be, or an optimizer is none of optax.

    Args:
        loss_fn: as the user gave it.
        optimizer: likewise.
        has_state: whether the loss takes and returns model state.
    """
    check_loss(loss_fn, has_state=has_state)
    check_optimizer(optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what is no optax transformation."""
    methods = (getattr(optimizer, name, None) for name in ("init", "update"))
    if isinstance(optimizer, type) or not all(map(callable, methods)):
        raise ValueError(
            f"the optimizer must be an optax transformation, not {_kind(optimizer)}{_uncalled(optimizer)}"
        )


def check_key(rng: Any) -> None:
    """Raises ValueError for what is no random key, of the new kind or the old."""
    cure = (
        f": write jax.random.key({rng})"
        if isinstance(rng, (int, np.integer))
        else ", such as jax.random.key(0)"
    )
    if not isinstance(rng, (jax.Array, np.ndarray)):
        raise ValueError(f"rng must be a random key, not {_kind(rng)}{cure}")
    shape = () if is_key(rng) else jax.eval_shape(jax.random.PRNGKey, 0).shape
    if rng.shape != shape or (not is_key(rng) and rng.dtype != np.uint32):
        raise ValueError(f"rng must be one random key, not {rng.dtype}{list(rng.shape)}{cure}")


def check_arrays(tree: Tree, role: Role) -> None:
    """Raises ValueError for leaves that are shapes alone, or arrays whose buffers are gone."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(leaf, LazyArray):
            raise ValueError(f"{role} '{path_name(path)}' is a shape: give an array")
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{role} '{path_name(path)}' was deleted or donated: give an array that is still there"
            )


def _kind(value: Any) -> str:
    if isinstance(value, (str, int, float, type(None))):
        return brief(value)
    if callable(value) and hasattr(value, "__name__"):
        return f"{'the class' if isinstance(value, type) else 'the function'} {value.__name__}"
    return f"a {type(value).__name__}"


def _uncalled(value: Any) -> str:
    return (
        f": call it, {_called(value)}(...)"
        if callable(value) and hasattr(value, "__name__")
        else ""
    )


def _called(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def check_chooser(schedule: Schedule, planner: str) -> None:
    """Raises ValueError if an order of tasks is left to a planner that chooses none."""
    if schedule == AUTO and find_planner(planner).as_paper:
        raise ValueError(
            f"schedule 'auto' is chosen by planner 'jvpipe', not by '{planner}': leave planner out, or name a schedule "
            "such as '1f1b' or 'interleaved'"
        )


def shares_devices(replicas: Any, stages: int | Plan | None, planner: str) -> bool:
    """Whether how many devices each stage has is to be decided.

    Args:
        replicas: as the user gave them.
        stages: their number, if that is given, or a plan.
        planner: by its name.

    Raises:
        ValueError: it cannot be decided.
    """
    if not isinstance(replicas, str) or replicas != "auto":
        return False
    if isinstance(stages, Plan):
        raise ValueError(
            f"replicas='auto' is given with a plan, whose stages have {stages.replicas} devices: leave it out"
        )
    if planner not in shape_planners():
        raise ValueError(
            f"replicas='auto' is decided by planners {', '.join(shape_planners())}, not by '{planner}': name one of "
            "these, or give the devices of each stage, such as replicas=(2, 1)"
        )
    if find_planner(planner).as_paper and stages is not None:
        raise ValueError(
            f"replicas='auto' with planner '{planner}', which decides the number of stages itself: leave stages out"
        )
    return True


def checked_stages(
    stages: Any, schedule: Schedule, microbatches: int, *, shares: bool
) -> int | Plan | None:
    """The number of stages, or a plan; None where that is to be decided.

    Args:
        stages: as the user gave them.
        schedule: in which order they run.
        microbatches: of a step.
        shares: how many devices each has is to be decided.
    """
    if isinstance(stages, Plan):
        stages = stages.under(schedule.name)
        length = pipeline_length(stages, schedule)
    elif stages is None and shares:
        length = 1
    else:
        stages = length = USUAL_STAGES if stages is None else whole_number("stages", stages)
    schedule.check(length, microbatches)
    schedule.warn_of_idle(length, microbatches)
    return stages


def place(
    stages: int | Plan | None,
    devices: Sequence[Device] | None,
    schedule: Schedule,
    replicas: Sequence[int] | None,
    *,
    shares: bool,
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The distinct devices, and the index of each stage's first one among them, if they are known.

    Args:
        stages: their number, or a plan; None: it is to be decided.
        devices: given for these.
        schedule: says which stages share a device.
        replicas: how many devices each stage takes, if some take several.
        shares: that is to be decided.
    """
    if stages is None or shares:
        return place_shared(stages, devices)
    return (
        place_replicas(replicas, devices, schedule)
        if replicas
        else place_stages(stages, devices, schedule)
    )


def place_shared(
    stages: int | Plan | None, devices: Sequence[Device] | None
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The devices that stages are to share, of which none has a stage yet.

    Args:
        stages: their number, if that is given.
        devices: given, all different.
    """
    given = checked_devices(devices)
    _check_different(given)
    if isinstance(stages, int) and stages > len(given):
        raise ValueError(
            f"{stages} stages need {stages} devices, there are {len(given)}: use at most {len(given)} stages"
        )
    return tuple(given), ()


def place_stages(
    stages: int | Plan, devices: Sequence[Device] | None, schedule: Schedule
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The distinct devices, and the index of each stage's device among them.

    Devices that are given stay, used or not: a later plan may have more stages.

    Args:
        stages: the devices that the pipeline passes, or a plan.
        devices: given for these.
        schedule: says which stages share a device.
    """
    given = checked_devices(devices)
    if devices is None:
        given = [*dealt(stages.device_count if isinstance(stages, Plan) else stages, given), *given]
    distinct = tuple(dict.fromkeys(given))
    if isinstance(stages, Plan):
        return distinct, ()
    there = len(distinct if devices is None else given)
    if stages > there:
        raise ValueError(
            f"{stages} stages need {stages} devices, there are {there}: use at most {there} stages, "
            "or share devices by naming them more than once in devices="
        )
    used = tuple(dict.fromkeys(given[:stages])) if devices is None else distinct
    places = [schedule.device_of(stage, stages) for stage in range(schedule.stages_on(stages))]
    return used, tuple(used.index(given[place]) for place in places)


def checked_replicas(
    replicas: Any, stages: int | Plan, schedule: Schedule
) -> tuple[int, ...] | None:
    """The devices of each stage, by their number; None if every stage has one.

    Args:
        replicas: as the user gave them.
        stages: their number, or a plan.
        schedule: in which order they run.

    Raises:
        ValueError: they are no such numbers, or not those of the stages.
    """
    given = None if isinstance(replicas, str) else several(replicas)
    if given is None and replicas is not None:
        raise ValueError(
            f"replicas must be the devices of each stage, such as (2, 1), or 'auto', not {brief(replicas)}"
        )
    counts = (
        None if given is None else tuple(whole_number("each of replicas", count) for count in given)
    )
    if isinstance(stages, Plan):
        if counts not in (None, stages.replicas):
            raise ValueError(
                f"replicas={counts} is given with a plan, whose stages have {stages.replicas}: leave it out"
            )
        return None
    if counts is not None and len(counts) != stages:
        raise ValueError(
            f"replicas={counts} says so of {len(counts)} stages, there are {stages}: give a number for each"
        )
    if counts is None or max(counts) == 1:
        return None
    check_replicable(schedule)
    return counts


def place_replicas(
    replicas: Sequence[int], devices: Sequence[Device] | None, schedule: Schedule
) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """The devices, and the index of the first one of each stage among them: in their order, stage by stage.

    Args:
        replicas: how many each place of the pipeline takes.
        devices: given for them, all different.
        schedule: says which stages share a place.

    Raises:
        ValueError: there are too few, or one is named twice.
    """
    given = checked_devices(devices)
    _check_different(given)
    if sum(replicas) > len(given):
        raise ValueError(
            f"replicas={tuple(replicas)} need {sum(replicas)} devices, there are {len(given)}: use fewer replicas or "
            "stages"
        )
    used = given[: sum(replicas)] if devices is None else given
    firsts, places = [first for first, *_ in replicas_at(replicas)], len(replicas)
    stages = range(schedule.stages_on(places))
    return tuple(used), tuple(firsts[schedule.device_of(s, places)] for s in stages)


def _check_different(devices: Sequence[Device]) -> None:
    """Raises ValueError if a device is named twice."""
    if twice := next((device for i, device in enumerate(devices) if device in devices[:i]), None):
        raise ValueError(
            f"device {twice} is named twice: where stages are replicated each replica needs one of its own"
        )


def replicas_at(replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The indices of the devices of each stage.

    >>> replicas_at((2, 1))
    ((0, 1), (2,))
    """
    return tuple(tuple(range(a, b)) for a, b in pairwise([0, *accumulate(replicas)]))


def dealt(stages: int, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices of all processes in the order in which stages take them: a block of stages for each process.

    Raises:
        ValueError: there are fewer stages than processes, or a process has fewer devices than its block has stages.
    """
    processes = list(dict.fromkeys(device.process_index for device in devices))
    if len(processes) == 1:
        return tuple(devices)
    if stages < len(processes):
        raise ValueError(
            f"{stages} stages are too few for {len(processes)} processes: use at least as many stages, or fewer "
            "processes"
        )
    left = {process: [d for d in devices if d.process_index == process] for process in processes}
    order = []
    for s in range(stages):
        process = processes[s * len(processes) // stages]
        if not left[process]:
            block = sum(
                i * len(processes) // stages == processes.index(process) for i in range(stages)
            )
            raise ValueError(
                f"{stages} stages in blocks over {len(processes)} processes need {block} devices of process {process}: "
                "use fewer stages, or more processes"
            )
        order.append(left[process].pop(0))
    return tuple(order)
