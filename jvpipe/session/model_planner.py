"""The first plan of a model: planned, the place of the optimizer's state with it, or given; and compiled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from jvpipe._jax import first_of, is_own
from jvpipe.cost.archive import surroundings
from jvpipe.cost.model import carried
from jvpipe.cost.presets import accelerator_of
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Fate, Plan
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.user_fates import checkpointed, with_fates, with_state_fates
from jvpipe.programs.bit_equality import same_bits, same_update
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.runtime.engine.training_state import Leaf, Name
from jvpipe.schedules.auto import AUTO
from jvpipe.session.devices import dealt
from jvpipe.session.measuring import Bench, ChosenShape, Measurement, find_shape
from jvpipe.session.planning import ASKING, Planned, decide
from jvpipe.session.settings import OptimizerCutter, Settings, option_parts
from jvpipe.session.splitting import SPLITTING, CutCandidate, Splitter
from jvpipe.trace.digests import without_addresses
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_as_planned

A = TypeVar("A")
ALL_AWAY = {"*": Fate.SWAP.value}


def state_bytes(graph: LayerGraph, optimizer: OptimizerCut) -> dict[str, int]:
    """Counts the bytes of the optimizer's state of each parameter that has some, by the parameter's path.

    Args:
        graph: the model's layers.
        optimizer: cut for these layers.
    """
    sizes: dict[str, int] = {}
    for leaf in optimizer.state:
        if leaf.parameter is not None and leaf.owner is not None:
            name = graph.parameters[leaf.parameter].array.name
            sizes[name] = sizes.get(name, 0) + leaf.array.bytes
    return sizes


def away_s(plan: Plan, sizes: Mapping[str, int], problem: Problem) -> float:
    """Counts the seconds of a step that the fullest device's state is on its ways.

    Args:
        plan: whose state fates count.
        sizes: of each parameter's state.
        problem: whose answer the plan is.
    """
    held_bytes: dict[int, int] = {}
    for stage in plan.stages:
        away = sum(sizes.get(name, 0) for name, fate in stage.state_fates.items() if fate == "swap")
        for device in stage.devices:
            held_bytes[device] = held_bytes.get(device, 0) + away
    # Without a flush each micro-batch is an update, and takes the state there and back.
    updates = 1 if problem.schedule.synchronous else problem.microbatches
    return updates * max(map(problem.host.seconds, held_bytes.values()))


def brought_back(plan: Plan, sizes: Mapping[str, int], room: Mapping[int, int]) -> Plan:
    """Keeps on the devices what state they have room for, the largest first.

    Args:
        plan: some of whose state is away.
        sizes: of each parameter's state.
        room: the bytes that each device has left.

    >>> from jvpipe.ir.plan import Stage
    >>> away = dict.fromkeys("abc", Fate.SWAP)
    >>> plan = brought_back(Plan((Stage((0,), (0,), state_fates=away),)), {"a": 4, "b": 9, "c": 6}, {0: 11})
    >>> sorted(plan.stages[0].state_fates)
    ['a', 'c']
    """
    left, stages = dict(room), []
    for stage in plan.stages:
        fates = dict(stage.state_fates)
        # The largest first, and of equals by name: every process decides alike.
        for name in sorted(fates, key=lambda name: (-sizes.get(name, 0), name)):
            size = sizes.get(name, 0)
            if all(size <= left[device] for device in stage.devices):
                del fates[name]
                left |= {device: left[device] - size for device in stage.devices}
        stages.append(replace(stage, state_fates=fates))
    return replace(plan, stages=tuple(stages))


def room_left(plan: Plan, held_bytes: Sequence[int], limits: Mapping[int, int]) -> dict[int, int]:
    """Counts the bytes that each device of a plan has left.

    Args:
        plan: whose devices they are.
        held_bytes: what the fullest device of each stage holds.
        limits: of each device.
    """
    room: dict[int, int] = {}
    for stage, size in zip(plan.stages, held_bytes, strict=True):
        for device in stage.devices:
            # A device of several stages has what the fullest of them leaves.
            room[device] = min(room.get(device, limits[device]), limits[device] - size)
    return room


def place_state(
    kept: A, away: Callable[[], A], judged: Callable[[A], tuple[Planned, float] | None]
) -> A:
    """Decides where the optimizer's state lies: on the devices, unless that leaves too little room.

    It goes to the host where else nothing fits, or where its way there takes less than what is
    computed again to make room for it.

    Args:
        kept: the answer with all of it on the devices.
        away: finds the answer with it on the host.
        judged: says what was planned in an answer, and the seconds of a step; None if that keeps
            no limit.
    """
    here = judged(kept)
    if here is not None and not pays_for_room(here[0]):
        return kept
    other = away()
    there = judged(other)
    return other if here is None or (there is not None and there[1] < here[1]) else kept


# The first plan of a model: planned and compiled, or compiled as it was given.


class Chosen(NamedTuple):
    """A plan that was compiled, what it was decided on, and why its stages have as many devices as they have."""

    compiled: CompiledPlan
    planned: Planned | None = None
    shape: ChosenShape | None = None


@dataclass(frozen=True)
class ModelPlanner:
    """Plans a traced model; what it checks against the limits is what will run.

    Args:
        settings: what the user asked for.
        bench: times programs.
        cutter: cuts the optimizer for a model in these layers.
        leaves: what puts or makes the parameters, which takes room too.
    """

    settings: Settings
    bench: Bench
    cutter: OptimizerCutter
    leaves: Mapping[Name, Leaf]
    _checked: list[CompiledPlan] = field(default_factory=list)

    def plan(self, traced: Traced, *, finer: bool) -> Chosen:
        """Plans, unless the plan is given, and compiles what was planned.

        Also says what that was decided on. Under a limit that is planned with and without the
        optimizer's state on the devices (`place_state`).

        Args:
            traced: the model, in whole layers.
            finer: also try layers cut in two.

        Raises:
            ValueError: there are more stages than layers, or the given plan does not fit.
            MemoryLimitExceeded: no plan keeps the limit.
        """
        # Bytes that may leave the devices; none if the user decides, or nothing is limited.
        sizes = self._may_leave(traced)
        if not sizes:
            return self._planned(traced, finer=finer)

        def judged(answer: Chosen | MemoryLimitExceeded) -> tuple[Planned, float] | None:
            if isinstance(answer, MemoryLimitExceeded):
                return None
            assert answer.planned is not None
            return answer.planned, self._step_s(answer.compiled, answer.planned)

        kept = _attempted(lambda: self._planned(traced, finer=finer))
        away = partial(_attempted, lambda: self._state_away(traced, sizes, finer=finer))
        chosen = place_state(kept, away, judged)
        if isinstance(chosen, MemoryLimitExceeded):
            raise chosen
        return chosen

    def _may_leave(self, traced: Traced) -> dict[str, int]:
        """Counts the bytes of each parameter's state, if the planner may leave it on the host; else none."""
        settings = self.settings
        by_user = isinstance(settings.stages, Plan) or settings.fates or settings.state_fates
        chooses = find_planner(settings.planner).chooses_fates
        if by_user or not chooses or not settings.limits or settings.checkpoint is not None:
            return {}
        sizes = state_bytes(traced.graph, self.cut(traced))
        host = settings.host_limit_bytes
        return sizes if host is None or sum(sizes.values()) < host else {}

    def _state_away(self, traced: Traced, sizes: Mapping[str, int], *, finer: bool) -> Chosen:
        """Plans with the optimizer's state on the host, except what the devices then have room for."""
        host = self.settings.host_limit_bytes
        # What all state takes there is not left for swapped values.
        rest = None if host is None else host - sum(sizes.values())
        settings = replace(self.settings, state_fates=ALL_AWAY, host_limit_bytes=rest)
        chosen = replace(self, settings=settings)._planned(traced, finer=finer)
        compiled, limits = chosen.compiled, dict(enumerate(settings.limits))
        traced, plan = compiled.traced, compiled.plan
        room = room_left(plan, self._held_bytes(traced, plan), limits)
        plan = brought_back(plan, state_bytes(traced.graph, compiled.optimizer), room)
        # State that came back may lie beside a peak that it was not counted with.
        still_left = room_left(plan, self._held_bytes(traced, plan), limits)
        if min(still_left.values()) < 0:
            return chosen
        return chosen._replace(compiled=self._to_run(traced, plan))

    def _step_s(self, compiled: CompiledPlan, planned: Planned) -> float:
        """Counts the seconds of a step; state that comes from the host and goes back is not hidden by anything."""
        sizes = state_bytes(compiled.traced.graph, compiled.optimizer)
        return planned.step_s + away_s(compiled.plan, sizes, planned.problem)

    def _planned(self, traced: Traced, *, finer: bool) -> Chosen:
        """Plans with the optimizer's state where the settings say."""
        settings = self.settings
        if isinstance(settings.stages, Plan):
            plan = settings.stages.under(settings.schedule.name)
            traced = split_as_planned(traced, plan.splits)
            return Chosen(self._compiled(traced, self._with_user_fates(traced, plan)))
        if settings.shares:
            return self._shared(traced, finer=finer)
        assert settings.stages is not None
        chooses = not find_planner(settings.planner).as_paper
        splitter = self._splitter()
        stages = settings.schedule.stages_on(settings.stages)
        traced = splitter.finest(traced, stages) if chooses else traced
        # Now it is known how fine the layers can be.
        settings.schedule.check_layers(settings.stages, len(traced.graph.layers))
        # Fates that the user gives name whole layers.
        limited = chooses and bool(settings.limits) and not settings.fates
        # The orders of "auto" even out what whole layers leave uneven.
        finer = chooses and finer and settings.schedule != AUTO
        question = self._question(traced) if finer and self.bench.archive.folder else ()
        best = self._as_before(traced, question) if question else None
        if best is None:
            best, rounds = (
                splitter.within_limit(traced, stages, self._candidate)
                if limited
                else (self._candidate(traced), SPLITTING.rounds)
            )
            if finer:
                best = splitter.better(best, self._candidate, rounds)
            if question:
                self.bench.archive.keep(list(map(float, best.traced.splits)), *question)
        return Chosen(self._to_run(best.traced, best.planned.plan), best.planned)

    def _shared(self, traced: Traced, *, finer: bool) -> Chosen:
        """Decides how many devices each stage has; where that is one, cuts and fates are planned for such stages."""
        settings, schedule = self.settings, self.settings.schedule
        everybody = tuple(range(len(settings.devices)))
        with phase("planning how stages share devices"):
            measurement = self._measurement(traced, schedule.chunks, everybody)
            shape = find_shape(measurement, partial(self._held_bytes, traced))
        if (planned := shape.planned) is not None:
            return Chosen(self._to_run(traced, planned.plan), planned, shape)
        n, order = shape.places, settings.devices
        # With fewer stages than processes some of these have nothing to do.
        if n >= len({device.process_index for device in order}):
            order = dealt(n, order)
        schedule.check(n, settings.microbatches)
        places = (
            settings.devices.index(order[schedule.device_of(s, n)])
            for s in range(schedule.stages_on(n))
        )
        alone = replace(settings, stages=n, places=tuple(places), shares=False)
        return replace(self, settings=alone)._planned(traced, finer=finer)._replace(shape=shape)

    def cut(self, traced: Traced) -> OptimizerCut:
        """Cuts the optimizer for a model in these layers."""
        return self.cutter.cut(traced.graph, self.settings.schedule)

    def _question(self, traced: Traced) -> tuple[str, ...]:
        """Says what the layers that are best cut in two depend on, beside measured seconds."""
        settings, kinds = self.settings, dict.fromkeys(body.structure for body in traced.bodies)
        numbers = {kind: number for number, kind in enumerate(kinds)}
        of_layers = [numbers[body.structure] for body in traced.bodies]
        model = (traced.graph, list(kinds), of_layers)
        # Whether layers are measured again does not change which cuts are best.
        options = option_parts(replace(settings, remeasure=False))
        update = self.cutter.text(traced.graph, settings.schedule)
        texts = map(without_addresses, (*map(repr, (options, *model)), update))
        return "splits", surroundings(first_of(settings.devices[0])), *texts

    def _as_before(self, traced: Traced, question: Sequence[str]) -> CutCandidate | None:
        """Plans for layers that are cut in two as an earlier process found best, so that no other cuts are tried."""
        splits = self.bench.archive.find(*question)
        if splits is None:
            return None
        try:
            return self._candidate(split_as_planned(traced, [int(place) for place in splits]))
        except (ValueError, MemoryLimitExceeded):
            return None

    def _candidate(self, traced: Traced) -> CutCandidate:
        """Plans a model cut into these layers."""
        settings = self.settings
        assert isinstance(settings.stages, int)
        stages, places = settings.schedule.stages_on(settings.stages), settings.places
        with phase("measuring layers and links"):
            problem = self._measurement(traced, stages, places).problem()
        with phase("planning"):
            held, fixed = partial(self._held_bytes, traced), settings.hosts is not None
            planned = decide(settings.planner, problem, places, held, fixed=fixed)
        return CutCandidate(traced, planned)

    def _measurement(self, traced: Traced, stages: int, places: tuple[int, ...]) -> Measurement:
        return Measurement(self.settings, stages, places, traced, self.cut(traced), self.bench)

    def _held_bytes(self, traced: Traced, plan: Plan) -> list[int]:
        """Returns what the fullest device of each stage holds at most, while arrays are made or in a step."""
        compiled, devices = self._checked_plan(traced, plan), self.settings.devices
        devices = (compiled.stand_in,) * len(devices) if compiled.stand_in else devices
        # Programs of other processes cannot be compiled here: one device stands for all.
        placing = replace(compiled.placing, devices=devices)
        both = zip(compiled.peaks, placing.peaks(self.leaves), strict=True)
        peaks = [max(step.bytes, making.bytes) for step, making in both]
        return [max(peaks[device] for device in stage.devices) for stage in compiled.plan.stages]

    def _to_run(self, traced: Traced, plan: Plan) -> CompiledPlan:
        """Compiles a plan for all processes; what was checked in one process alone, if that is all there are."""
        checked = self._checked_plan(traced, plan)
        return checked if checked.stand_in is None else replace(checked, stand_in=None)

    def _checked_plan(self, traced: Traced, plan: Plan) -> CompiledPlan:
        """Compiles a planner's plan, or finds it if it was compiled before: what is checked, runs."""
        plan = replace(self._with_user_fates(traced, plan), splits=traced.splits)
        if groups := self.settings.replicas:
            places = (
                self.settings.schedule.device_of(s, len(groups)) for s in range(len(plan.stages))
            )
            plan = plan.on([groups[place] for place in places])
        # What was checked against the limits is what runs, not another one like it.
        compiled = next((x for x in self._checked if x.traced is traced and x.plan == plan), None)
        if compiled is None:
            compiled = self._compiled(traced, plan)
            if self.settings.hosts is not None:
                compiled = replace(compiled, stand_in=next(filter(is_own, self.settings.devices)))
            self._checked.append(compiled)
        return compiled

    def _compiled(self, traced: Traced, plan: Plan) -> CompiledPlan:
        return compile_plan(self.settings, self.bench.store, traced, plan, self.cut(traced))

    def _splitter(self) -> Splitter:
        device = first_of(self.settings.devices[0])

        def keeps_bits(whole: Traced, layer: int, halves: Traced) -> bool:
            updates = self.cut(whole), layer, self.cut(halves)
            return same_bits(self.bench.store, device, whole, layer, halves) and same_update(
                self.bench.store, device, *updates
            )

        return Splitter(accelerator_of(device), keeps_bits)

    def _with_user_fates(self, traced: Traced, plan: Plan) -> Plan:
        if self.settings.checkpoint is not None:
            plan = checkpointed(traced.graph, plan, self.settings.checkpoint)
        plan = with_fates(traced.graph, plan, self.settings.fates)
        return with_state_fates(traced.graph, plan, self.settings.state_fates)


def _attempted(plan: Callable[[], Chosen]) -> Chosen | MemoryLimitExceeded:
    """Plans; where that keeps no limit, gives the error."""
    try:
        return plan()
    except MemoryLimitExceeded as error:
        return error


def pays_for_room(planned: Planned) -> bool:
    """Tells whether a step takes noticeably longer than the same cuts would with everything kept."""
    if not any(planned.decision.choices):
        return False
    # The same cuts without any fate: what the limit costs.
    kept = replace(planned, decision=Decision.keeping_all(planned.decision.bounds))
    return planned.step_s > (1 + ASKING.noticed) * kept.step_s


def compile_plan(
    settings: Settings, store: ProgramStore, traced: Traced, plan: Plan, optimizer: OptimizerCut
) -> CompiledPlan:
    """Makes a plan ready to run.

    Args:
        settings: those of the pipeline.
        store: where programs are compiled, once they are asked for.
        traced: the model.
        plan: which layers run where.
        optimizer: cut for these layers.

    Raises:
        ValueError: the plan does not fit the layers or the devices.
    """
    if plan.splits and plan.splits != traced.splits:
        raise ValueError(
            f"the plan splits layers before equations {list(plan.splits)}, this pipeline's are split before "
            f"{list(traced.splits)}: a plan with other layers needs a new pipeline, Pipeline(stages=plan)"
        )
    plan = replace(plan, splits=traced.splits)
    plan.check(len(traced.graph.layers), len(settings.devices))
    compiled = CompiledPlan(
        traced,
        plan,
        settings.schedule,
        optimizer,
        settings.microbatches,
        settings.devices,
        store,
        hosts=settings.hosts,
    )
    if settings.schedule.synchronous:
        _check_carried(compiled)
    return compiled


def _check_carried(compiled: CompiledPlan) -> None:
    """Raises ValueError if a device that runs several stages would wait, with a forward, for one of its own to come."""
    plan = compiled.plan
    for first, *_, last in carried(compiled.traced.graph):
        reads, writes = plan.stage_of(first), plan.stage_of(last)
        for stages in ({task.stage for task in tasks} for tasks in compiled.lists):
            if reads != writes and reads in stages and len(stages) > 1:
                raise ValueError(
                    f"layer {first} of stage {reads} reads the model state that layer {last} of stage {writes} writes: "
                    f"where a device runs several stages both need one stage. Move a cut, or use '1f1b' or 'zb-h1'"
                )
