"""What a timeline shows: stretches of time in which a device did one thing, copies between devices, bytes held."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jvpipe.ir.kinds import Kind


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one row of a timeline.

    `device` names the row: a device, or a link where transfers are to be seen beside the work they
    overlap. Spans of one row follow each other. `name` is the task's text form (`2F0`); times count
    from any common origin; `args` is whatever else to show (JSON-able).

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
    """One end of a copy between devices: where it leaves, or where it `arrives`.

    Both ends have its `key`.
    """

    key: str
    device: str
    at_s: float
    arrives: bool


class Level(NamedTuple):
    """How many bytes a place holds from a moment on: a device, or the host."""

    place: str
    at_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Picture:
    """All that a timeline shows of some steps; the levels of a place are in the order of time."""

    spans: tuple[Span, ...]
    levels: tuple[Level, ...] = ()
    hops: tuple[Hop, ...] = ()
