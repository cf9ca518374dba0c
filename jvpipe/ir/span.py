"""The contents of a timeline: tasks on devices, copies between devices, and bytes over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jvpipe.ir.kinds import Kind


@dataclass(frozen=True, slots=True)
class Span:
    """One task in one line of a timeline, unrelated to `PlanSpan`, a part of a stream.

    Attributes:
        device: the name of the line: a device or, for a transfer, a link. Spans of one line do not
            overlap, but a transfer may overlap with work of its device.
        name: the text form of the task, such as `2F0`.
        start_s: when it starts, in seconds from an origin that all spans share.
        end_s: when it ends, from the same origin.
        kind: the kind of the task, which determines the color.
        args: further values to show, of types that JSON can represent.

    >>> span = Span("cpu:0", "2F0", 1.0, 1.5, Kind.F)
    >>> span.end_s - span.start_s
    0.5
    """

    device: str
    name: str
    start_s: float
    end_s: float
    kind: Kind
    args: Mapping[str, Any] = field(default_factory=dict)


class Hop(NamedTuple):
    """One end of a copy between devices.

    `device` is the target of the copy if `arrives` is true, and its source otherwise. Both ends
    have the same `key`.
    """

    key: str
    device: str
    at_s: float
    arrives: bool


class Level(NamedTuple):
    """The bytes that a device or the host holds from `at_s` until its next level."""

    place: str
    at_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Picture:
    """The contents of a timeline of some steps. The levels of each place are in time order."""

    spans: tuple[Span, ...]
    levels: tuple[Level, ...] = ()
    hops: tuple[Hop, ...] = ()

    def since(self, zero_s: float) -> "Picture":
        """Returns the picture with times counted from `zero_s`."""
        spans = []
        for span in self.spans:
            start_s, end_s = span.start_s - zero_s, span.end_s - zero_s
            spans.append(replace(span, start_s=start_s, end_s=end_s))
        levels = [level._replace(at_s=level.at_s - zero_s) for level in self.levels]
        hops = [hop._replace(at_s=hop.at_s - zero_s) for hop in self.hops]
        return Picture(tuple(spans), tuple(levels), tuple(hops))
