"""The contents of a timeline: tasks on devices, copies between devices, and bytes over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jvpipe.ir.kinds import Kind


@dataclass(frozen=True, slots=True)
class Span:
    """One task in one line of a timeline.

    `device` names the line: a device, or a link, so that transfers are seen beside the work that
    they overlap. Spans of one line do not overlap. `name` is the text form of the task (`2F0`).
    Times count from an origin that all spans share. `args` has other values to show, which JSON can
    hold.

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
    """The bytes that a device or the host holds from a moment on."""

    place: str
    at_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that a timeline shows of some steps; the levels of a place are ordered by time."""

    spans: tuple[Span, ...]
    levels: tuple[Level, ...] = ()
    hops: tuple[Hop, ...] = ()
