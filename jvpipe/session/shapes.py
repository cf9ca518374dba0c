"""How many devices each stage of a pipeline is to have: layers are measured on slices, and the planner asked.

Where stages cannot have several devices, or none should, each has one and cuts and fates are planned as for any number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jvpipe.ir.plan import Plan
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.shapes import Shapes
from jvpipe.report.shapes import shape_reasons, shape_words
from jvpipe.runtime.replicas import check_replicable
from jvpipe.session.asking import Planned, ask_shapes
from jvpipe.session.measuring import Measurement
from jvpipe.trace.spread import CoupledError

_ATTEMPTS = 4


@dataclass(frozen=True)
class ChosenShape:
    """How many places a pipeline has, and why, in lines; `planned` if some of them have several devices."""

    places: int
    why: tuple[str, ...]
    planned: Planned | None = None


@dataclass(frozen=True)
class ShapeSearch:
    """What it takes to find the shape of a traced model.

    Args:
        measurement: measures it, and says what is wanted.
        stages: how many there are to be; None if that is to be decided.
    """

    measurement: Measurement
    stages: int | None

    def find(self, held_bytes_of: Callable[[Plan], Sequence[int]]) -> ChosenShape:
        """Finds the shape of the fastest simulated step under the limit.

        Args:
            held_bytes_of: what the fullest device of each stage of a plan holds, by the lowered lists.
        """
        request = self.measurement.request
        if refused := self._refused():
            return self.one_each(refused)
        try:
            local, least = self.measurement.slices()
        except CoupledError as coupled:
            return self.one_each(str(coupled))
        examples = self.measurement.traced.graph.examples
        shapes = self.measurement.shapes(local, Pins(self.stages, size=examples, least_slice=least))
        limit = shapes.model.memory_limit_bytes
        asked = shapes
        for _ in range(_ATTEMPTS):
            try:
                planned = ask_shapes(request.planner, asked)
            except Infeasible:
                break
            answer = planned.problem, planned.decision, planned.shapes
            why = (_summary(shapes, planned), *shape_reasons(shapes, *answer))
            places = planned.problem.devices
            if not planned.problem.replicated:
                return ChosenShape(places, why)
            try:
                over = self._over_bytes(planned, held_bytes_of)
            except ValueError as unlike:  # a layer leaves other things on slices than on the whole
                return self.one_each(str(unlike))
            if over <= 0:
                return ChosenShape(places, why, planned)
            asked = _tighter(asked, over)
        return self.one_each(
            f"no plan with replicas was found that keeps the limit of {limit} bytes"
        )

    def _over_bytes(self, planned: Planned, held_bytes_of: Callable[[Plan], Sequence[int]]) -> int:
        """By how much a device of a plan holds more than it may; less than 1 if it fits."""
        if not self.measurement.request.limits:
            held_bytes_of(planned.plan)
            return 0
        problem = planned.problem
        limits = [problem.limit_of(place) or 0 for place in problem.places]
        held = held_bytes_of(planned.plan)
        return max(size - limit for size, limit in zip(held, limits, strict=True))

    def one_each(self, why: str) -> ChosenShape:
        """As many stages as are asked for, or as there can be, of one device each.

        Args:
            why: they have no more.
        """
        measurement = self.measurement
        layers = len(measurement.traced.graph.layers)
        chunks = measurement.request.schedule.chunks
        most = max(1, min(len(measurement.devices), layers // chunks))
        places = most if self.stages is None else self.stages
        return ChosenShape(places, (f"each stage has one device: {why}",))

    def _refused(self) -> str | None:
        """Why stages cannot have several devices, whatever the loss is."""
        schedule = self.measurement.request.schedule
        try:
            check_replicable(schedule)
        except ValueError as cannot:
            return str(cannot)
        if not schedule.synchronous:
            return f"under {schedule.name} they are not planned yet"
        if len(self.measurement.devices) < 2:
            return "there are no more"
        return None


def _summary(shapes: Shapes, planned: Planned) -> str:
    """Says what shape was chosen, and what a step takes."""
    return f"on {shapes.devices} devices {shape_words(planned.problem)}: step {1e3 * planned.step_s:.2f} ms simulated"


def _tighter(shapes: Shapes, over: int) -> Shapes:
    """The same shapes under a limit that is smaller by so many bytes."""
    limit = shapes.model.memory_limit_bytes
    assert limit is not None
    return shapes.under(max(1, limit - over))
