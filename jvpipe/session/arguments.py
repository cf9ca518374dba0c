"""The checks of a user's arguments: numbers, names, functions, random keys and streams.

Each check raises ValueError for a wrong value, with a message that names the option and the value,
and suggests a valid value. A check whose name begins with `check_` returns nothing. The others
return the value in the form that the code after them needs.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import jax
import numpy as np

from jvpipe._jax import Tracer
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import find_planner
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.schedules.auto import AUTO
from jvpipe.trace.keys import is_key
from jvpipe.trace.leaves import Role
from jvpipe.util.brief import brief
from jvpipe.util.given import is_stream, is_whole, several
from jvpipe.util.names import did_you_mean
from jvpipe.util.paths import path_name

Tree = Any
Limits = int | tuple[int, ...] | None
"""The bytes that devices may hold: one limit for all devices, or one for each. None stands for the
limits that devices report; for absent hardware, None stands for all of its memory."""
PER_LAYER = "per_layer"
"""A value of `stacked`: the optimizer sees parameters of scanned layers as one array per layer."""
USUAL_STAGES, USUAL_MICROBATCHES = 2, 4
"""The default numbers of stages and micro-batches, both in `Pipeline` and in `plan_for`."""


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Checks a whole number of Python or NumPy, and returns it as an int.

    Args:
        name: the name of the option, for the message.
        value: what the user gave.
        least: the smallest number allowed.
        most: the largest number allowed; None if there is no limit.
    """
    if most is not None and is_whole(value) and value > most:
        raise ValueError(f"{name} must be a whole number of at most {most}, not {brief(value)}")
    if not is_whole(value) or value < least:
        cuts = ""
        if isinstance(value, (list, tuple)):
            cuts = "; for layers per stage write jvpipe.Plan.from_cuts([2, 2])"
        raise ValueError(
            f"{name} must be a whole number of at least {least}, not {brief(value)}{cuts}"
        )
    return int(value)


def positive(name: str, value: Any, largest: float = math.inf) -> float:
    """Checks that a number is above 0 and at most `largest`, and returns it as a float.

    Args:
        name: the name of the option, for the message.
        value: what the user gave.
        largest: the largest number allowed.
    """
    if not _is_positive(value) or value > largest:
        limit = "" if largest == math.inf else f", and at most {largest:.3g}"
        raise ValueError(f"{name} must be a number above 0{limit}, not {brief(value)}")
    return float(value)


def _is_positive(value: Any) -> bool:
    is_number = is_whole(value) or isinstance(value, float | np.floating)
    return is_number and bool(0 < value < math.inf)


def one_of(kind: str, choices: Iterable[str]) -> Callable[[str, Any], str]:
    """Makes a check that a name is one of `choices`; messages call a choice a `kind`."""
    # Every call of `check` reads the names, and an iterator could be read only once.
    names = list(choices)

    def check(name: str, value: Any) -> str:
        if checked_name(name, value, names[0]) not in names:
            raise ValueError(f"{name}: {did_you_mean(kind, value, names)}")
        return value

    return check


def read_whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Reads whole numbers from a sequence or a text.

    >>> read_whole_numbers("replicas", "2:1"), read_whole_numbers("cuts", [5, 2])
    ((2, 1), (5, 2))
    """
    parts = re.split("[:,]", value) if isinstance(value, str) else several(value)
    if parts is None:
        raise ValueError(f"{name} must be some whole numbers, such as (2, 1), not {brief(value)}")

    def read(part: Any) -> Any:
        return int(part) if isinstance(part, str) and part.strip().isdecimal() else part

    return tuple(whole_number(f"each of {name}", read(part)) for part in parts)


def checked_name(name: str, value: Any, usual: str) -> str:
    """Checks that a value can be a name, which is any text that is not empty.

    Args:
        name: the name of the option, for the message.
        value: what the user gave.
        usual: the name that the message gives as an example.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"{name} must be a name such as '{usual}', not {_kind(value)}{_uncalled(value)}"
        )
    return value


def checked_schedule(name: str, schedule: Any) -> Schedule:
    """Returns the schedule with the given name; a `Schedule` object is accepted, too."""
    return find_schedule(
        schedule if isinstance(schedule, Schedule) else checked_name(name, schedule, "1f1b")
    )


def checked_stages(name: str, stages: Any, largest: int) -> int | Plan:
    """Checks the number of stages, and returns it; a plan is returned unchanged.

    Args:
        name: the name of the option, for the message.
        stages: what the user gave.
        largest: the largest number of stages that is accepted.
    """
    return stages if isinstance(stages, Plan) else whole_number(name, stages, most=largest)


def checked_fates(name: str, fates: Any, of: str) -> dict[str, str]:
    """Returns a mapping from patterns of names to fates (keep, swap or recompute).

    Args:
        name: the name of the option, for the message.
        fates: a mapping, or a text from a command line.
        of: the kind of objects that the patterns name, for the message.

    Raises:
        ValueError: `fates` is neither a mapping of texts nor a text of the form below.

    >>> checked_fates("state_fates", "embed/*=keep,*=swap", of="parameters")
    {'embed/*': 'keep', '*': 'swap'}
    """
    if isinstance(fates, str):
        parts = [part.rpartition("=") for part in fates.split(",")]
        if all(pattern and fate for pattern, _, fate in parts):
            return {pattern.strip(): fate.strip() for pattern, _, fate in parts}
    if not isinstance(fates, Mapping) or not all(
        isinstance(text, str) for text in (*fates, *fates.values())
    ):
        raise ValueError(f"{name} must map names of {of}, not {brief(fates)}")
    return dict(fates)


def checked_stacked(name: str, stacked: Any) -> str:
    """Checks the option that sets how an optimizer sees stacked layers.

    >>> checked_stacked("stacked", "per_layer")
    'per_layer'
    """
    if not isinstance(stacked, str) or stacked != PER_LAYER:
        raise ValueError(
            f"{name} must be None (the optimizer sees stacked layers as plain optax does) "
            f"or '{PER_LAYER}' (it sees slices), not {brief(stacked)}"
        )
    return stacked


def checked_moment(at: Any) -> tuple[int, int] | None:
    """Checks a moment, which is a step and one of its micro-batches; returns None for None.

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
    """Checks that the argument of `migrate` is a plan, and returns it."""
    if not isinstance(plan, Plan):
        raise ValueError(
            f"migrate needs a jvpipe.Plan, such as Plan.from_cuts([3, 1]), not {brief(plan)}"
        )
    return plan


def checked_stream(batches: Any, num_steps: Any) -> Iterator[Any]:
    """Returns an iterator over a stream, limited to `num_steps` batches unless this is None."""
    if isinstance(batches, Mapping) or not is_stream(batches):
        raise ValueError(
            "run takes a stream of batches, such as a list, not one "
            f"{type(batches).__name__}: use step"
        )
    if num_steps is not None and not (is_whole(num_steps) and num_steps >= 0):
        raise ValueError(f"num_steps must be a whole number of at least 0, not {brief(num_steps)}")
    return islice(batches, num_steps)


def check_loss(loss_fn: Any, *, has_state: bool) -> None:
    """Raises ValueError if a loss cannot be called with the arguments that a pipeline passes."""
    names = ("params", "model_state", "batch", "rng") if has_state else ("params", "batch", "rng")
    taken = ", ".join(names)
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise ValueError(f"the loss must be a function of ({taken}), not {_kind(loss_fn)}")
    if misfit := misfit_of(loss_fn, names):
        signature, error = misfit
        raise ValueError(
            f"the loss {_called(loss_fn)}{signature} is called with ({taken}), "
            f"has_state={has_state}: {error}; wrap it, lambda {taken}: ..."
        ) from error


def misfit_of(
    function: Callable[..., Any], arguments: Sequence[str]
) -> tuple[inspect.Signature, TypeError] | None:
    """Returns a function's signature and the error if it does not take these arguments.

    The arguments are bound to the signature; the function is not called.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature, such as one written in C
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return signature, error
    return None


def check_functions(loss_fn: Any, optimizer: Any, *, has_state: bool) -> None:
    """Raises ValueError if a loss has the wrong arguments, or an optimizer is not optax's.

    Args:
        loss_fn: as the user gave it.
        optimizer: as the user gave it.
        has_state: whether the loss takes and returns model state.
    """
    check_loss(loss_fn, has_state=has_state)
    methods = (getattr(optimizer, name, None) for name in ("init", "update"))
    if isinstance(optimizer, type) or not all(map(callable, methods)):
        raise ValueError(
            "the optimizer must be an optax transformation, not "
            f"{_kind(optimizer)}{_uncalled(optimizer)}"
        )


def check_key(rng: Any) -> None:
    """Raises ValueError unless `rng` is one random key, made by JAX's `key` or `PRNGKey`."""
    cure = ", such as jax.random.key(0)"
    if isinstance(rng, (int, np.integer)):
        cure = f": write jax.random.key({rng})"
    if not isinstance(rng, (jax.Array, np.ndarray)):
        raise ValueError(f"rng must be a random key, not {_kind(rng)}{cure}")
    # A key of `PRNGKey` is an array of 32-bit words, whose shape depends on JAX's settings.
    shape = () if is_key(rng) else jax.eval_shape(jax.random.PRNGKey, 0).shape
    if rng.shape != shape or (not is_key(rng) and rng.dtype != np.uint32):
        raise ValueError(f"rng must be one random key, not {rng.dtype}{list(rng.shape)}{cure}")


def check_arrays(tree: Tree, role: Role) -> None:
    """Raises ValueError for leaves that are only shapes, and for arrays that were deleted."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(leaf, LazyArray):
            raise ValueError(f"{role} '{path_name(path)}' is a shape: give an array")
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{role} '{path_name(path)}' was deleted or donated: give an array "
                "that is still there"
            )


def _kind(value: Any) -> str:
    if isinstance(value, (str, int, float, type(None))):
        return brief(value)
    if callable(value) and hasattr(value, "__name__"):
        return f"{'the class' if isinstance(value, type) else 'the function'} {value.__name__}"
    return f"a {type(value).__name__}"


def _uncalled(value: Any) -> str:
    is_named = callable(value) and hasattr(value, "__name__")
    return f": call it, {value.__name__}(...)" if is_named else ""


def _called(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def check_chooser(schedule: Schedule, planner: str) -> None:
    """Raises ValueError if the schedule is `AUTO` and the planner cannot choose task orders."""
    if schedule == AUTO and find_planner(planner).as_paper:
        raise ValueError(
            f"schedule 'auto' is chosen by planner 'jvpipe', not by '{planner}': use "
            "planner 'jvpipe', or name a schedule such as '1f1b' or 'interleaved'"
        )


def checked_replicas(name: str, replicas: Any) -> str | tuple[int, ...]:
    """Checks the number of devices of each stage: a number for each stage, or "auto".

    >>> checked_replicas("replicas", "2:1"), checked_replicas("replicas", "auto")
    ((2, 1), 'auto')
    """
    is_text = isinstance(replicas, str)
    if is_text and replicas == "auto":
        return replicas
    if not any(map(str.isdigit, replicas)) if is_text else several(replicas) is None:
        raise ValueError(
            f"{name} must be the devices of each stage, such as (2, 1), or 'auto', not "
            f"{brief(replicas)}"
        )
    return read_whole_numbers(name, replicas)


_SPEEDS = "such as [2.0, 1.0] for a device twice as fast as the other"


def checked_speeds(name: str, speeds: Any) -> tuple[float, ...]:
    """Checks the relative speed of each device.

    >>> checked_speeds("speeds", np.array([2, 1]))
    (2.0, 1.0)
    >>> checked_speeds("speeds", [2, 0])
    Traceback (most recent call last):
    ValueError: speeds [2, 0]: each must be a number above 0, such as [2.0, 1.0] for a device twice as fast as the other
    """
    listed: list[Any] = several(speeds) or [speeds]
    if not all(map(_is_positive, listed)):
        raise ValueError(f"{name} {brief(speeds)}: each must be a number above 0, {_SPEEDS}")
    return tuple(map(float, listed))


def check_speeds(speeds: tuple[float, ...], devices: int) -> None:
    """Raises ValueError unless there is a speed for each device, or no speed at all."""
    if speeds and len(speeds) != devices:
        raise ValueError(
            f"{len(speeds)} speeds for {devices} devices: give one for each, {_SPEEDS}"
        )


def check_deferred(options: Mapping[str, Any]) -> None:
    """Raises ValueError unless the other options allow deferred batch norms.

    Deferred batch norms keep sums over a whole batch in the model state. So they need a model
    state, and each batch must end before the next one begins. Replicas are not allowed, because
    each replica would sum over its own examples only.
    """
    if not options["deferred_batch_norm"]:
        return
    if not options["has_state"]:
        raise ValueError(
            "deferred_batch_norm=True, but the loss carries no model state: say "
            "has_state=True, and carry the running statistics of batch norms in it"
        )
    if not options["schedule"].synchronous:
        raise ValueError(
            "deferred_batch_norm=True needs a schedule that ends each batch, such as "
            f"'1f1b', not '{options['schedule'].name}'"
        )
    replicas = options["replicas"]
    if replicas == "auto" or any(count > 1 for count in replicas or ()):
        raise ValueError(
            f"deferred_batch_norm=True with replicas={replicas!r}: each replica has sums "
            "of its own examples alone; leave out one of the two, or call "
            "jvpipe.deferred_batch_norm in the loss"
        )
