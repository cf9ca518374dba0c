"""The first plan of a model: made by a planner or given by the user, and compiled.

A planner's plan is accepted only after it was compiled and its exact bytes were counted (see
planning.py). Two variants are also tried: some layers cut in two (planners/splitting.py), and the
optimizer's state on the host (`ModelPlanner.plan`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from jvpipe.cost.archive import surroundings
from jvpipe.cost.model_costs import carried
from jvpipe.cost.presets import accelerator_of
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.problem import Decision
from jvpipe.planners.planned_problem import Planned
from jvpipe.planners.splitting import SPLITTING, CutCandidate, Splitter
from jvpipe.planners.state_on_host import ALL_AWAY, away_s, brought_back, room_left, state_bytes
from jvpipe.planners.user_fates import checkpointed, with_fates, with_state_fates
from jvpipe.programs.bit_equality import same_bits, same_update
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.host_link import link_between
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.runtime.engine.training_state import Leaf, Name
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.session.checked_settings import dealt
from jvpipe.session.measuring import Bench, Measurement, find_shape
from jvpipe.session.planning import ASKING, ChosenShape, decide
from jvpipe.session.settings import OptimizerCutter, Settings, option_parts
from jvpipe.trace.digests import without_addresses
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_as_planned
from jvpipe.util.devices import first_of, is_own


def pays_for_room(planned: Planned) -> bool:
    """Tells whether recomputing or swapping values makes the plan's step noticeably longer.

    If so, a plan with the optimizer's state on the host may be faster, because moving the state
    makes room for the values that are now recomputed or swapped.
    """
    if not any(planned.decision.choices):
        return False
    # A plan with the same cuts that keeps every value shows how many seconds the limit costs.
    kept = replace(planned, decision=Decision.keeping_all(planned.decision.bounds))
    return planned.step_s > (1 + ASKING.noticed) * kept.step_s


class Chosen(NamedTuple):
    """A compiled plan, the planner's answer behind it, and its shape with the reasons."""

    compiled: CompiledPlan
    planned: Planned | None = None
    shape: ChosenShape | None = None


@dataclass(frozen=True)
class ModelPlanner:
    """Makes a model's first plan. It checks the limits with the same programs that later run.

    Args:
        settings: what the user asked for.
        bench: times programs.
        cutter: cuts the optimizer for the layers of a trace.
        leaves: by name, objects that make the parameters or put them on devices. The memory that
            this takes counts, too.
        finer: also try plans with some layers cut in two.
    """

    settings: Settings
    bench: Bench
    cutter: OptimizerCutter
    leaves: Mapping[Name, Leaf]
    finer: bool
    _checked: list[CompiledPlan] = field(default_factory=list)

    def plan(self, traced: Traced) -> Chosen:
        """Makes a plan, unless the user gives one, and compiles it.

        Under a limit, a plan with the optimizer's state on the devices is made first. A
        second plan, with the state on the host, is made if the first plan does not fit, or
        if it recomputes or swaps values at a noticeable cost. The faster plan is taken.

        Args:
            traced: the model, with whole layers.

        Raises:
            ValueError: there are more stages than layers, or the given plan does not fit.
            MemoryLimitExceeded: no plan keeps the limit.
        """
        # The bytes of state that may lie on the host; empty if none may.
        sizes = self._may_leave(traced)
        try:
            kept = self._planned(traced)
        except MemoryLimitExceeded:
            if not sizes:
                raise
            return self._state_away(traced, sizes)
        if not sizes:
            return kept
        assert kept.planned is not None
        if not pays_for_room(kept.planned):
            return kept
        try:
            away = self._state_away(traced, sizes)
        except MemoryLimitExceeded:
            return kept
        return away if _step_s(away) < _step_s(kept) else kept

    def plan_together(self, traced: Traced) -> Chosen:
        """Plans as `plan` does; if there are several processes, the first measures and decides.

        Args:
            traced: the model, with whole layers; equal in all processes.
        """
        settings = self.settings
        hosts = settings.hosts
        if hosts is None or isinstance(settings.stages, Plan):
            return self.plan(traced)
        planner = self
        # All processes take part in measuring the link, before the first process decides.
        if find_planner(settings.planner).asks_seconds:
            bench = replace(self.bench, between_hosts=link_between(hosts))
            planner = replace(self, bench=bench)
        decided: list[Chosen] = []

        def planned() -> str:
            decided.append(planner.plan(traced))
            return json.dumps(decided[0].compiled.plan.to_json())

        plan = Plan.from_json(json.loads(hosts.decided("plan", planned)))
        if decided:
            return decided[0]
        return replace(planner, settings=replace(settings, stages=plan)).plan(traced)

    def _may_leave(self, traced: Traced) -> dict[str, int]:
        """Counts the bytes of each parameter's state; empty if the planner must not move state."""
        settings = self.settings
        by_user = isinstance(settings.stages, Plan) or settings.fates or settings.state_fates
        if by_user or not settings.chooses_fates or settings.checkpoint is not None:
            return {}
        sizes = state_bytes(traced.graph, self.cut(traced))
        host = settings.host_limit_bytes
        return sizes if host is None or sum(sizes.values()) < host else {}

    def _state_away(self, traced: Traced, sizes: Mapping[str, int]) -> Chosen:
        """Plans with optimizer state on the host, except the part that the devices can hold."""
        host = self.settings.host_limit_bytes
        # Host memory that the state takes is not available for swapped values.
        rest = None if host is None else host - sum(sizes.values())
        settings = replace(self.settings, state_fates=ALL_AWAY, host_limit_bytes=rest)
        chosen = replace(self, settings=settings)._planned(traced)
        compiled, limits = chosen.compiled, settings.limits
        traced, plan = compiled.traced, compiled.plan
        room = room_left(plan, self._held_bytes(traced, plan), limits)
        plan = brought_back(plan, state_bytes(traced.graph, compiled.optimizer), room)
        # The returned state may move the peak to another row, so the bytes are counted again.
        if min(room_left(plan, self._held_bytes(traced, plan), limits).values()) < 0:
            return chosen
        return chosen._replace(compiled=self._to_run(traced, plan))

    def _planned(self, traced: Traced) -> Chosen:
        """Plans with the optimizer's state on the devices or the host, as the settings say."""
        settings = self.settings
        if isinstance(settings.stages, Plan):
            plan = settings.stages.under(settings.schedule.name)
            traced = split_as_planned(traced, plan.splits)
            return Chosen(self._compiled(traced, self._with_user_fates(traced, plan)))
        if settings.shares:
            return self._shared(traced)
        assert settings.stages is not None
        chooses = not find_planner(settings.planner).as_paper
        splitter = self._splitter()
        stages = settings.schedule.stages_on(settings.stages)
        traced = splitter.finest(traced, stages) if chooses else traced
        # The number of layers is checked after `finest`, which may have cut some in two.
        settings.schedule.check_layers(settings.stages, len(traced.graph.layers))
        # The user's fates name values of whole layers. With such fates, layers are not cut in two
        # to keep a limit.
        limited = chooses and settings.limits and not settings.fates
        # Under "auto", the order of tasks compensates for uneven stages: finer cuts are not tried.
        finer = chooses and self.finer and settings.schedule != AUTO
        question = self._question(traced) if finer and self.bench.archive.folder else ()
        best = self._as_before(traced, question) if question else None
        if best is None:
            if limited:
                best, rounds = splitter.within_limit(traced, stages, self._candidate)
            else:
                best, rounds = self._candidate(traced), SPLITTING.rounds
            if finer:
                best = splitter.better(best, self._candidate, rounds)
            if question:
                self.bench.archive.keep(list(map(float, best.traced.splits)), *question)
        return Chosen(self._to_run(best.traced, best.planned.plan), best.planned)

    def _shared(self, traced: Traced) -> Chosen:
        """Decides how many devices each stage has; plans as usual if each has one."""
        settings, schedule = self.settings, self.settings.schedule
        everybody = tuple(range(len(settings.devices)))
        with phase("planning how stages share devices"):
            measurement = self._measurement(traced, schedule.chunks, everybody)
            shape = find_shape(measurement, partial(self._held_bytes, traced))
        if (planned := shape.planned) is not None:
            return Chosen(self._to_run(traced, planned.plan), planned, shape)
        n, order = shape.places, settings.devices
        # `dealt` needs a stage for each process. With fewer stages, the order is unchanged.
        if n >= len({device.process_index for device in order}):
            order = dealt(n, order)
        schedule.check(n, settings.microbatches)
        of_stages = [order[schedule.device_of(s, n)] for s in range(schedule.stages_on(n))]
        places = tuple(map(settings.devices.index, of_stages))
        alone = replace(settings, stages=n, places=places, shares=False)
        return replace(self, settings=alone)._planned(traced)._replace(shape=shape)

    def cut(self, traced: Traced) -> OptimizerCut:
        """Cuts the optimizer for the layers of a trace."""
        return self.cutter.cut(traced.graph, self.settings.schedule)

    def _question(self, traced: Traced) -> tuple[str, ...]:
        """Returns, as texts, all inputs except seconds that decide which layers are cut in two.

        The texts are the archive's key for the chosen cuts. Measured seconds vary from process to
        process, so with seconds in the key a model would never find its cuts.
        """
        settings = self.settings
        structures = [body.structure for body in traced.bodies]
        # A dict keeps the kinds of layers in order of appearance.
        kinds = list(dict.fromkeys(structures))
        of_layers = list(map(kinds.index, structures))
        # `remeasure` only decides whether old measurements are used, so it is not part of the key.
        options = option_parts(replace(settings, remeasure=False))
        update = self.cutter.lines(traced.graph, settings.schedule)
        texts = map(repr, (options, traced.graph, kinds, of_layers, update))
        device = first_of(settings.devices[0])
        return "splits", surroundings(device), *map(without_addresses, texts)

    def _as_before(self, traced: Traced, question: Sequence[str]) -> CutCandidate | None:
        """Plans with cuts inside layers that an earlier process chose; None if none can be used."""
        splits = self.bench.archive.find(*question)
        if splits is None:
            return None
        try:
            return self._candidate(split_as_planned(traced, [int(place) for place in splits]))
        except (ValueError, MemoryLimitExceeded):
            return None

    def _candidate(self, traced: Traced) -> CutCandidate:
        """Plans a model without cutting layers in two."""
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
        """Returns each stage's peak on its fullest device, in a step or while arrays are made."""
        compiled, devices = self._checked_plan(traced, plan), self.settings.devices
        devices = (compiled.stand_in,) * len(devices) if compiled.stand_in else devices
        # Programs cannot be compiled for other processes' devices, so a local device replaces them.
        placing = replace(compiled.placing, devices=devices)
        both = zip(compiled.peaks, placing.peaks(self.leaves), strict=True)
        peaks = [max(step.bytes, making.bytes) for step, making in both]
        return [max(peaks[device] for device in stage.devices) for stage in compiled.plan.stages]

    def _to_run(self, traced: Traced, plan: Plan) -> CompiledPlan:
        """Returns the checked plan, ready to run on its true devices instead of a stand-in."""
        checked = self._checked_plan(traced, plan)
        return checked if checked.stand_in is None else replace(checked, stand_in=None)

    def _checked_plan(self, traced: Traced, plan: Plan) -> CompiledPlan:
        """Compiles a planner's plan, or returns it if it was compiled before."""
        plan = replace(self._with_user_fates(traced, plan), splits=traced.splits)
        if groups := self.settings.replicas:
            device_of = self.settings.schedule.device_of
            places = [device_of(s, len(groups)) for s in range(len(plan.stages))]
            plan = plan.on([groups[place] for place in places])
        for compiled in self._checked:
            if compiled.traced is traced and compiled.plan == plan:
                return compiled
        compiled = self._compiled(traced, plan)
        if self.settings.hosts is not None:
            compiled = replace(compiled, stand_in=next(filter(is_own, self.settings.devices)))
        self._checked.append(compiled)
        return compiled

    def _compiled(self, traced: Traced, plan: Plan) -> CompiledPlan:
        warmup = None
        if self.settings.schedule.warmup_updates:  # an asynchronous run begins synchronously
            warmup = self.cutter.cut(traced.graph, ONE_F_ONE_B)
        cut = self.cut(traced)
        return compile_plan(self.settings, self.bench.store, traced, plan, cut, warmup)

    def _splitter(self) -> Splitter:
        device = first_of(self.settings.devices[0])

        def keeps_bits(whole: Traced, layer: int, halves: Traced) -> bool:
            """Tells whether a layer's halves give results bitwise identical to the layer's.

            Args:
                whole: the model before the split.
                layer: the layer's index in `whole`.
                halves: the same model with the two halves in place of the layer.
            """
            store = self.bench.store
            return same_bits(store, device, whole, layer, halves) and same_update(
                store, device, self.cut(whole), layer, self.cut(halves)
            )

        return Splitter(accelerator_of(device), keeps_bits)

    def _with_user_fates(self, traced: Traced, plan: Plan) -> Plan:
        if self.settings.checkpoint is not None:
            plan = checkpointed(traced.graph, plan, self.settings.checkpoint)
        plan = with_fates(traced.graph, plan, self.settings.fates)
        return with_state_fates(traced.graph, plan, self.settings.state_fates)


def _step_s(chosen: Chosen) -> float:
    """Returns a step's seconds; copies of state are assumed not to overlap with other work."""
    compiled, planned = chosen.compiled, chosen.planned
    assert planned is not None
    sizes = state_bytes(compiled.traced.graph, compiled.optimizer)
    return planned.step_s + away_s(compiled.plan, sizes, planned.problem)


def compile_plan(
    settings: Settings,
    store: ProgramStore,
    traced: Traced,
    plan: Plan,
    optimizer: OptimizerCut,
    warmup_optimizer: OptimizerCut | None = None,
) -> CompiledPlan:
    """Makes a plan ready to run.

    Args:
        settings: the settings of the pipeline.
        store: compiles programs when they are first needed.
        traced: the model.
        plan: assigns layers to devices.
        optimizer: the optimizer, cut for these layers.
        warmup_optimizer: the optimizer, cut for the synchronous steps that begin an asynchronous
            run; None if there are no such steps.

    Raises:
        ValueError: the plan does not fit the layers or the devices.
    """
    if plan.splits and plan.splits != traced.splits:
        raise ValueError(
            f"the plan splits layers before equations {list(plan.splits)}, this pipeline's "
            f"are split before {list(traced.splits)}: a plan with other layers needs a new "
            "pipeline, Pipeline(stages=plan)"
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
        warmup_optimizer=warmup_optimizer,
    )
    if settings.schedule.synchronous:
        _check_carried(compiled)
    return compiled


def _check_carried(compiled: CompiledPlan) -> None:
    """Raises ValueError if a task might wait for a later task of the same device.

    Model state is carried from one micro-batch to the next: the first layer that reads a
    leaf waits until the last layer that writes it has run on the previous micro-batch. A
    device with several stages runs one stage for several micro-batches before it runs its
    next stage. Suppose that the reader is in the device's first stage, and the writer in a
    later stage of the pipeline. The reader's second micro-batch then waits for the writer.
    The writer may wait for the device's next stage, which runs only after that micro-batch.
    """
    plan = compiled.plan
    for first, *_, last in carried(compiled.traced.graph):
        reads, writes = plan.stage_of(first), plan.stage_of(last)
        for stages in ({task.stage for task in tasks} for tasks in compiled.lists):
            if reads != writes and reads in stages and len(stages) > 1:
                raise ValueError(
                    f"layer {first} of stage {reads} reads the model state that layer "
                    f"{last} of stage {writes} writes: where a device runs several stages "
                    "both need one stage. Move a cut, or use '1f1b' or 'zb-h1'"
                )
