"""Plans a model from its shapes, for absent hardware: the function `plan_for`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import Cluster
from jvpipe.cost.reported_temporaries import Said
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.plan import Plan
from jvpipe.papers.asking import ask_shapes
from jvpipe.papers.registry import PLANNERS, find_planner
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.state_on_host import ALL_AWAY, away_s, brought_back, room_left
from jvpipe.schedules import Schedule
from jvpipe.session.arguments import (
    USUAL_MICROBATCHES,
    USUAL_STAGES,
    Limits,
    check_functions,
    checked_name,
)
from jvpipe.session.forecast import Forecast, asked, timed, with_splits
from jvpipe.session.model_planner import pays_for_room
from jvpipe.session.options import checked
from jvpipe.session.question import Question, check_shape_planner, given_pins, limits_on
from jvpipe.session.signing import Signer, signed
from jvpipe.util.brief import brief
from jvpipe.util.given import several
from jvpipe.util.option import PLAN_FOR

Tree = Any
_log = logging.getLogger("jvpipe")
USUAL_HARDWARE = "a100-40gb"


def plan_for(
    loss_fn: Callable[..., Any],
    params: Tree,
    batch: Tree,
    stages: int | None = None,
    *,
    devices: int | None = None,
    replicas: Sequence[int] | str | None = None,
    cuts: Sequence[int] | str | None = None,
    hardware: str | Cluster | None = None,
    memory_limit: int | str | Sequence[int | str] | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule = "1f1b",
    planner: str | Sequence[str] = "jvpipe",
    optimizer: Optimizer | None = None,
    model_state: Tree = None,
    has_aux: bool = False,
    has_state: bool = False,
    stacked: str | None = None,
    frozen: Sequence[str] | None = None,
    state_fates: Mapping[str, str] | None = None,
    whole_layers: bool = False,
    compile: bool | str = False,
    title: str = "",
) -> Forecast:
    """Plans a model from its shapes, for absent hardware; nothing is allocated or run.

    With `compile`, the compiler of that hardware reports the bytes of the plan's programs.
    It compiles each program once; the reports are kept in JAX's compilation cache. If the plan
    exceeds the limit, another plan is made.

    With `devices`, `replicas` or `cuts`, a stage may have several devices. The planner then chooses
    each of stages, replicas, cuts and micro-batches that is not given.

    Args:
        loss_fn: as `jvpipe.Pipeline` takes it.
        params: arrays, or their shapes, or a function `key -> params`.
        batch: a whole batch, as arrays or their shapes.
        stages: the number of stages; 2 by default, unless the planner decides.
        devices: the number of devices of all stages together; by default, the sum of `replicas`, or
            else all devices of the hardware.
        replicas: the devices per stage, such as (3, 1) or "3:1"; "auto" lets the planner choose.
        cuts: how many layers each stage has.
        hardware: a cluster, as a name such as "h100", a TOML file or a `Cluster`. Its first
            devices are used. The default is "a100-40gb".
        memory_limit: bytes, or a text such as "16GiB", for all devices; or a sequence with
            a limit for each. The default is all the memory of the devices.
        microbatches: the number of micro-batches of a batch; 4 by default, unless the planner
            decides.
        schedule: a name, or a `Schedule` with options; replicas need a synchronous schedule.
        planner: the name of a planner, or several to compare; "all" compares all planners.
            Replicas are planned by "jvpipe", "pipedream" or "dapple".
        optimizer: the optimizer whose state is counted; AdamW by default.
        model_state: arrays, or their shapes, if the loss has a model state (`has_state`).
        has_aux: whether the loss returns auxiliary values as well.
        has_state: whether the loss takes and returns a model state.
        stacked: how the optimizer sees stacked layers, as `jvpipe.Pipeline` takes it.
        frozen: patterns of parameters that are not updated, as `jvpipe.Pipeline` takes them.
        state_fates: where the optimizer's state is between updates, by patterns of parameters. By
            default, the planner decides if it is the only one and chooses fates. It puts state on
            the host if no other plan fits, or if copying the state takes less time than the
            recomputations that would make room for it.
        whole_layers: whether to recompute only whole layers, as `jvpipe.Pipeline` takes it.
        compile: True for the compiler of the hardware, or the name of a compile target,
            such as "v5e:4x4".
        title: the title of the figure.

    Raises:
        ValueError: an argument cannot be used; the message has its value and a remedy.
    """
    names, options = planner_names("planner", planner), checked(PLAN_FOR, locals())
    if optimizer is None:
        import optax  # not at the top of the file, because importing optax takes long

        optimizer = optax.adamw(1e-3)
    check_functions(loss_fn, optimizer, has_state=has_state)
    model = partial(Question, loss_fn=loss_fn, params=params, batch=batch, optimizer=optimizer)
    return _planned(partial(model, model_state=model_state), names, options, title)


def _planned(
    model: Callable[..., Question], names: Sequence[str], options: dict[str, Any], title: str
) -> Forecast:
    """Asks planners about a model.

    Args:
        model: makes the question about the model, given the other fields of a question.
        names: the names of the planners.
        options: the checked options of `plan_for`, by name; the function removes some of them.
        title: the title of the figure.
    """
    pins = {name: options.pop(name) for name in ("stages", "replicas", "cuts", "microbatches")}
    if isinstance(pins["stages"], Plan):
        cuts = [len(stage.layers) for stage in pins["stages"].stages]
        raise ValueError(
            f"stages must be a whole number, not a plan of {cuts} layers: plan_for looks for the "
            f"plan; to fix where it is cut, give cuts={cuts}"
        )
    named = ("devices", "memory_limit", "compile", "hardware")
    count, limit, target, hardware = map(options.pop, named)
    cluster = hardware or find_cluster(USUAL_HARDWARE)
    options["state_fates"] = options["state_fates"] or {}
    pinned = None
    # Each stage has one device, unless an option allows several.
    if count is None and pins["replicas"] is None and pins["cuts"] is None:
        count = pins["stages"] or USUAL_STAGES
        microbatches = pins["microbatches"] or USUAL_MICROBATCHES
        question = model(stages=count, microbatches=microbatches, **options)
        question.schedule.warn_of_idle(count, microbatches)
    else:
        question = model(stages=1, microbatches=1, **options)
        check_shape_planner(names, question.schedule)
        count, pinned = given_pins(question, cluster, count, **pins)
    asking = _Asking(question, cluster, names, count, pinned, title)
    if target is False:
        forecast = asking({}, limit)
    else:
        if len(names) > 1:
            raise ValueError(f"compile is for one planner, not for {', '.join(names)}: name one")
        signer = Signer.of(cluster, None if isinstance(target, bool) else target)
        forecast = signed(asking, question, signer, limits_on(cluster, limit, count))
    # The answer keeps the question, but drops its traces, which hold arrays such as constants.
    question.remembered.clear()
    return forecast


@dataclass(frozen=True)
class _Asking:
    """A question with hardware and planners, which can be asked again with new byte counts.

    A shape says which devices each stage has. `pins` are the parts of the shape that the
    user gives; the planner chooses the rest. If `pins` is None, each stage has one device.
    """

    question: Question
    cluster: Cluster
    names: Sequence[str]
    devices: int
    pins: Pins | None
    title: str

    def __call__(self, said: Said, limits: Limits) -> Forecast:
        """Returns the planners' answers.

        Args:
            said: the bytes of programs that the hardware's compiler has reported so far.
            limits: the limits of the devices.
        """
        asking = replace(self, question=replace(self.question, said=said))
        kept = asking._answer(limits)
        chooses = [find_planner(name).chooses_fates for name in self.names]
        if self.question.state_fates or chooses != [True]:
            return kept
        if kept.fits:
            assert kept.planned is not None
            if not pays_for_room(kept.planned):
                return kept
        away = asking._state_away(limits, kept.best.splits)
        if not kept.fits:
            return away
        return away if away.fits and away.step_s < kept.step_s else kept

    def _answer(self, limits: Limits, splits: tuple[int, ...] = ()) -> Forecast:
        """Returns answers with layers cut at `splits`; if `splits` is empty, cuts are sought."""
        question, cluster = self.question, self.cluster
        if self.pins is not None:
            shapes = question.shapes(cluster, self.devices, self.pins, limits)
            (planner,) = self.names
            put = partial(ask_shapes, planner, shapes)
            problem, best = timed(planner, shapes.model, put, question)
            return Forecast(problem, (best,), self.title, question, shapes)
        problem = question.problem(cluster, limits, splits)
        forecast = asked(problem, self.names, self.title, question, splits)
        if splits or any(find_planner(name).as_paper for name in self.names):
            return forecast
        return with_splits(question, forecast)

    def _state_away(self, limits: Limits, splits: tuple[int, ...]) -> Forecast:
        """Returns the answer with the optimizer's state on the host, except the part that fits.

        Layers are cut at `splits`, which were found with all state on the devices. If `splits` is
        empty, cuts are sought again.
        """
        sizes, cluster = self.question.state_bytes(), self.cluster
        if cluster.host_memory_bytes is not None:
            # Host memory that the state takes is not available for swapped residuals.
            rest = max(0, cluster.host_memory_bytes - sum(sizes.values()))
            cluster = replace(cluster, host_memory_bytes=rest)
        question = replace(self.question, state_fates=ALL_AWAY)
        away = replace(self, question=question, cluster=cluster)._answer(limits, splits)
        if not away.fits:
            return away
        best, problem = away.best, away.problem
        assert best.plan is not None
        assert best.evaluation is not None
        held = [best.evaluation.device_bytes[place] for place in problem.places]
        # A plan may not use all devices, so limits are found by the devices' numbers.
        limit_of: dict[int, int] = {}
        for place, stage in zip(problem.places, best.plan.stages, strict=True):
            limit_of |= dict.fromkeys(stage.devices, problem.limit_of(place) or 0)
        # With all state on the host, a device holds `held` bytes. State that fits into the rest of
        # the limit moves back to the device.
        plan = brought_back(best.plan, sizes, room_left(best.plan, held, limit_of))
        nearer = replace(best, plan=plan, state_s=away_s(plan, sizes, problem))
        return replace(away, answers=(nearer,))


def planner_names(option: str, planner: Any) -> list[str]:
    """Returns the names of the planners that a user selects.

    Args:
        option: the name of the option, for the message.
        planner: a name, several names in a list or in a text with commas, or "all".

    Raises:
        ValueError: a name is not that of a planner.

    >>> planner_names("planner", "even,dapple")
    ['even', 'dapple']
    """
    names = planner.split(",") if isinstance(planner, str) else several(planner)
    if not names:
        raise ValueError(
            f"{option} must be a name, or several, such as ['even', 'jvpipe'], not {brief(planner)}"
        )
    names = [checked_name(option, name, "jvpipe") for name in names]
    chosen = [p.name for p in PLANNERS] if names == ["all"] else names
    for name in chosen:
        find_planner(name)
    return chosen
