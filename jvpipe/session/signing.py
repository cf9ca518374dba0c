"""Finds plans whose programs, compiled for absent hardware, keep the memory limits.

A compiled plan may hold more bytes than the planner estimated. The planner is then asked again
until a compiled plan keeps the limits; the compiler is said to sign this plan. Each time, the bytes
that the compiler has reported replace the planner's estimates. If the planner still returns the
same plan, the reports do not explain the bytes over the limit. The planner's limits are then
lowered by these bytes.
"""

import logging
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from jvpipe.cost.archive import Archive
from jvpipe.cost.compiling import Sizes, compiler_of
from jvpipe.cost.hardware import Cluster
from jvpipe.cost.reported_temporaries import Said
from jvpipe.cost.target_store import RefusedProgram, TargetStore
from jvpipe.cost.targets import Target, target_of
from jvpipe.ir.buffers import Peak, peaks
from jvpipe.ir.compiled_stage import CompiledStage
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import Owner
from jvpipe.planners.answer import Answer, smallest_limit_bytes
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_bytes import layers_bytes
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.programs.model_programs import (
    backward_program,
    forward_program,
    input_program,
    weight_program,
)
from jvpipe.programs.store import Program, shared_store
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.session.forecast import Forecast
from jvpipe.session.planning import ASKING
from jvpipe.session.question import Question

_log = logging.getLogger("jvpipe")
Ask = Callable[[Said, tuple[int, ...]], Forecast]
"""Asks planners, given the compiler's reports on programs so far, and each device's limit."""


def signed(ask: Ask, question: Question, signer: "Signer", limits: tuple[int, ...]) -> Forecast:
    """Returns the first plan that keeps the limits as the hardware's compiler compiles it.

    If no plan keeps the limits, the answer names a limit that a plan would keep.

    Args:
        ask: asks a planner.
        question: the question about the model.
        signer: has the compilers of the devices.
        limits: the limits of the devices.
    """
    asking = ask, question, signer, limits
    forecast, more = _raised_by(0, *asking)
    if forecast is not None:
        return forecast
    # The loop ends because the limits grow without bound, while compiled bytes stay bounded.
    while (would_do := _raised_by(more, *asking)[0]) is None:
        more += max(1, more // 16)
    (answer,), smallest = would_do.answers, would_do.problem.memory_limit_bytes
    assert smallest is not None
    problem = replace(would_do.problem, memory_limit_bytes=smallest - more)
    infeasible = Infeasible(
        f"no plan of {answer.planner} keeps {problem.limit_said} as the compiler for "
        f"{signer.stores[0].compiler.target.name} makes it: {problem.enough_said(smallest)} "
        "would do. So may more stages or more micro-batches",
        smallest,
    )
    refused = Answer(answer.planner, answer.planning_s, infeasible=infeasible)
    return replace(would_do, problem=problem, answers=(refused,))


def _raised_by(
    more: int, ask: Ask, question: Question, signer: "Signer", limits: tuple[int, ...]
) -> tuple[Forecast | None, int]:
    """Asks for plans until a compiled plan keeps the limits, which are raised by `more` bytes.

    The other arguments are those of `signed`.

    Returns:
        The answers and `more`; or None, and the smallest raise at which a plan is expected to fit.
    """
    less, nearest, before = 0, math.inf, None
    for _ in range(ASKING.signings):
        forecast = ask(signer.said, tuple(max(1, size + more - less) for size in limits))
        limit = forecast.problem.memory_limit_bytes
        assert limit is not None
        if not forecast.fits:
            needed = more + smallest_limit_bytes(forecast.answers) - limit
            return None, int(min(nearest, needed))
        model = replace(forecast.question or question, microbatches=forecast.microbatches)
        stages = signer.stages(model, forecast.problem, forecast.best)
        # The excess of the fullest stage is counted over the true limits.
        problem = replace(forecast.problem, memory_limit_bytes=limit + less)
        pairs = zip(stages, problem.places, strict=True)
        over = max(stage.compiled_bytes - (problem.limit_of(at) or 0) for stage, at in pairs)
        if over <= 0:
            compiled = replace(forecast.best, compiled=tuple(stages))
            return replace(forecast, problem=problem, answers=(compiled,)), more
        _log.info("compiled, the plan is %d bytes over the limit: planning goes on", over)
        nearest = min(nearest, more + over)
        # If the planner repeats its plan, the reported bytes do not explain the excess, so only
        # lower limits lead to another plan.
        less += over if forecast.plan == before else 0
        before = forecast.plan
    return None, int(nearest)


@dataclass(frozen=True)
class Signer:
    """The compilers of a cluster's devices, with their reports on the bytes of programs."""

    cluster: Cluster
    stores: tuple[TargetStore, ...]  # one for each device

    @staticmethod
    def of(cluster: Cluster, target: Target | None = None) -> "Signer":
        """Returns the compilers for the devices of a cluster.

        Args:
            cluster: the hardware.
            target: the compile target of all devices; None to find targets by the devices' names.

        Raises:
            ValueError: no compile target is known for a device, or its compiler is not installed.
        """
        targets = [target or target_of(device) for device in cluster.accelerators]
        folder, stores = Archive.beside_the_cache().folder, dict[Target, TargetStore]()
        for one in targets:
            one.check()
            stores.setdefault(one, TargetStore(compiler_of(one, folder), shared_store()))
        return Signer(cluster, tuple(stores[one] for one in targets))

    @property
    def said(self) -> Said:
        """For each program, the report with the most temporary bytes among the compilers."""
        largest: dict[Hashable, Sizes] = {}
        for store in dict.fromkeys(self.stores):
            for key, sizes in store.sizes.items():
                before = largest.get(key, sizes)
                largest[key] = max(before, sizes, key=lambda x: x.temp_size_in_bytes)
        return largest

    def stages(self, question: Question, problem: Problem, answer: Answer) -> list[CompiledStage]:
        """Returns the bytes of each stage of a plan, as planned and as compiled.

        Args:
            question: has the model.
            problem: the problem to which the plan is an answer.
            answer: has the plan.

        Raises:
            ValueError: the compiler refuses a program.
        """
        plan, decision = answer.plan, answer.decision
        assert plan is not None
        assert decision is not None
        plan = replace(plan, splits=answer.splits)
        by_store = {
            store: _laid_peaks(self._compiled(question, plan, store))
            for store in dict.fromkeys(self.stores)
        }
        evaluation = evaluate_decision(self._unsaid(question, problem, answer), decision)
        stages = list[CompiledStage]()
        for s, stage in enumerate(plan.stages):
            first, last = decision.bounds[s : s + 2]
            # Replicas hold equal values, but their compilers, and so their bytes, may differ.
            fullest = max(stage.devices, key=lambda d: by_store[self.stores[d]][d][0].bytes)
            peak, padding, host = by_store[self.stores[fullest]][fullest]
            layers = problem.layers_on(s)[first:last]
            working = [x.working for x in layers_bytes(layers, decision.choices[first:last])]
            # The temporaries at the peak belong to the layer whose row (program or copy) runs then.
            at = peak.row.layer - first if peak.row else -1
            compiled = CompiledStage(
                target=self.stores[fullest].compiler.target.name,
                planned_bytes=evaluation.device_bytes[problem.places[s]],
                compiled_bytes=peak.bytes,
                row=str(peak.row) if peak.row else "the beginning",
                temporary_bytes=dict(peak.holders).get(str(Owner.TEMPORARY), 0),
                working_bytes=working[at] if 0 <= at < len(working) else 0,
                padding_bytes=padding,
                host_bytes=host,
            )
            stages.append(compiled)
        return stages

    def _unsaid(self, question: Question, problem: Problem, answer: Answer) -> Problem:
        """Returns the problem with estimates in place of the compilers' reports.

        The problem of a pipeline with replicas is returned unchanged.
        """
        if not question.said or problem.replicated:
            return problem
        model, guessing = question.trace_as(answer.splits), replace(question, said={})
        costs = guessing.costs(self.cluster, model.traced, question.cut(model))
        return replace(problem, costs=costs)

    def _compiled(self, question: Question, plan: Plan, store: TargetStore) -> CompiledPlan:
        run = question.compiled(plan, store)
        try:
            run.bounds  # noqa: B018 - reading the property compiles the programs
        except RefusedProgram as refused:
            raise ValueError(f"{_name_of(run, refused.program)}: {refused}") from None
        return run


def _laid_peaks(run: CompiledPlan) -> list[tuple[Peak, int, int]]:
    """Returns each device's peak, its bytes of padding, and the host's bytes for all devices.

    Padding is the memory that arrays take in addition to their elements.
    """
    least = [0] * len(run.devices)
    for bound in run.bounds:
        bare = peaks(bound.lowered, len(run.devices), bound.temporary_bytes)
        least = [max(size, peak.bytes) for size, peak in zip(least, bare, strict=False)]
    *laid, host = run.peaks
    pairs = zip(laid, least, strict=True)
    return [(peak, max(0, peak.bytes - size), host.bytes) for peak, size in pairs]


def _name_of(run: CompiledPlan, program: Program) -> str:
    """Returns the name of the layer to which a program belongs, or "the optimizer"."""
    for programs in run.programs:
        for layer, layer_programs in zip(run.traced.graph.layers, programs, strict=True):
            keys = [forward_program(layer_programs).key, backward_program(layer_programs).key]
            if layer_programs.halves is not None:
                keys += [input_program(layer_programs).key, weight_program(layer_programs).key]
            if program.key in keys:
                return f"layer {layer.id} ({layer.name})"
    return "the optimizer"
