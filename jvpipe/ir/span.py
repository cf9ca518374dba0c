"""The contents of a timeline: tasks on devices, copies between devices, and bytes over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jvpipe.ir.kinds import Kind


@dataclass(frozen=True, slots=True)
class Span:
    """One task in one line of a timeline. (A span of a stream is something else.)

    Attributes:
        device: the name of the line: that of a device or, for a transfer, that of a link. So
            transfers are seen beside the work that they overlap. Spans of one line do not
            overlap.
        name: the text form of the task, such as `2F0`.
        start_s: when it starts, in seconds from an origin that all spans share.
        end_s: when it ends, from the same origin.
        kind: the kind of the task, which gives its color.
        args: other values to show, which JSON can hold.

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
    """One end of a copy between devices: the device that it leaves or, if `arrives`, reaches.

    Both ends of a copy have the same `key`.
    """

    key: str
    device: str
    at_s: float
    arrives: bool


class Level(NamedTuple):
    """The bytes that a device or the host holds from a moment until its next level."""

    place: str
    at_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that a timeline shows of some steps. The levels of a place are in time order."""

    spans: tuple[Span, ...]
    levels: tuple[Level, ...] = ()
    hops: tuple[Hop, ...] = ()
