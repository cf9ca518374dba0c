"""Writes timelines as Chrome traces (for https://ui.perfetto.dev), and computes idle shares."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jvpipe.ir.kinds import KINDS
from jvpipe.ir.span import Hop, Picture, Span

COMPUTE = frozenset(kind for kind, info in KINDS.items() if info.busy)
"""The kinds of task in which a device works."""


def chrome_trace(picture: Picture) -> dict[str, Any]:
    """Returns a picture in Chrome's trace format, in microseconds since the first start.

    The trace has a row for each device, a counter of bytes for each place, and an arrow for each
    copy.

    >>> from jvpipe.ir.kinds import Kind
    >>> trace = chrome_trace(Picture((Span("cpu:0", "0F0", 1.0, 1.5, Kind.F),)))
    >>> [event["name"] for event in trace["traceEvents"]]
    ['process_name', 'thread_name', 'thread_sort_index', '0F0']
    >>> trace["traceEvents"][-1]["ts"], trace["traceEvents"][-1]["dur"]
    (0.0, 500000.0)
    """
    spans = sorted(picture.spans, key=lambda span: span.start_s)
    origin_s = spans[0].start_s if spans else 0.0

    def at(seconds: float) -> float:
        return (seconds - origin_s) * 1e6

    events = [_metadata("process_name", 0, name="jvpipe")]
    rows = dict[str, int]()
    for row, device in enumerate(sorted_devices(span.device for span in picture.spans)):
        rows[device] = row
        events += [
            _metadata("thread_name", row, name=device),
            _metadata("thread_sort_index", row, sort_index=row),
        ]
    # The letter `ph` is the kind of an event: X for a box, C for a counter, s and f for the start
    # and end of an arrow.
    for span in spans:
        box = {
            "ph": "X",
            "pid": 0,
            "tid": rows[span.device],
            "name": span.name,
            "cat": span.kind,
            "ts": at(span.start_s),
            "dur": (span.end_s - span.start_s) * 1e6,
            "args": dict(span.args),
        }
        events.append(box)
    for place, at_s, size in picture.levels:
        # Bytes held since before the first span are shown at its start.
        start = max(0.0, at(at_s))
        counted = {"name": f"{place} bytes", "ts": start, "args": {"bytes": size}}
        events.append({"ph": "C", "pid": 0, **counted})
    for number, ends in enumerate(_whole_hops(picture.hops)):
        for hop in ends:
            end = {"ph": "f", "bp": "e"} if hop.arrives else {"ph": "s"}
            where = {"pid": 0, "tid": rows[hop.device], "ts": at(hop.at_s)}
            events.append({**end, "id": number, "name": "copy", "cat": "copy", **where})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, picture: Picture) -> None:
    """Writes the Chrome trace of a picture to `path`."""
    path.write_text(json.dumps(chrome_trace(picture)))


def joined(pictures: Sequence[Picture]) -> Picture:
    """Joins pictures of steps into one; copies of different steps get different keys."""
    spans = chain.from_iterable(picture.spans for picture in pictures)
    levels = chain.from_iterable(picture.levels for picture in pictures)
    hops: list[Hop] = []
    for n, picture in enumerate(pictures):
        hops += (hop._replace(key=f"{n} {hop.key}") for hop in picture.hops)
    return Picture(tuple(spans), tuple(levels), tuple(hops))


def _whole_hops(hops: Iterable[Hop]) -> Iterator[list[Hop]]:
    """Yields the two ends (hops) of each copy: first the departure, then the arrival.

    A copy is skipped if only one of its ends is known.

    Different threads measure the two ends, and a thread may wake late. If the measured departure is
    after the arrival, the departure is set to the time of the arrival.
    """
    ends = defaultdict[str, list[Hop]](list)
    # False sorts before True, so the end where a copy leaves comes first.
    for hop in sorted(hops, key=lambda hop: hop.arrives):
        ends[hop.key].append(hop)
    for both in ends.values():
        if [hop.arrives for hop in both] == [False, True]:
            leaves, arrives = both
            yield [leaves._replace(at_s=min(leaves.at_s, arrives.at_s)), arrives]


class Busy(NamedTuple):
    """The seconds of work, summed over devices, and the time from first start to last end."""

    seconds: float
    elapsed_s: float
    devices: int

    @property
    def bubble_fraction(self) -> float:
        """The share of the time in which the devices were idle; 0 if there was no work.

        >>> Busy(2.0, 2.0, 2).bubble_fraction
        0.5
        """
        available_s = self.devices * self.elapsed_s
        return 1.0 - self.seconds / available_s if available_s > 0 else 0.0


def busy(spans: Iterable[Span]) -> Busy:
    """Adds up the seconds of work in spans; time in which spans of a device overlap counts once.

    >>> from jvpipe.ir.kinds import Kind
    >>> busy([Span("a", "0F0", 0.0, 1.0, Kind.F), Span("b", "1F0", 1.0, 2.0, Kind.F)])
    Busy(seconds=2.0, elapsed_s=2.0, devices=2)
    """
    worked_s, elapsed_s = _worked(spans)
    return Busy(sum(worked_s.values(), 0.0), elapsed_s, len(worked_s))


def busy_fractions(spans: Iterable[Span]) -> dict[str, float]:
    """Returns the share of time in which each device works, from the first start to the last end.

    >>> from jvpipe.ir.kinds import Kind
    >>> busy_fractions([Span("a", "0F0", 0.0, 1.0, Kind.F), Span("b", "1F0", 1.0, 4.0, Kind.F)])
    {'a': 0.25, 'b': 0.75}
    """
    worked_s, elapsed_s = _worked(spans)
    return {
        device: seconds / elapsed_s if elapsed_s else 0.0 for device, seconds in worked_s.items()
    }


def _worked(spans: Iterable[Span]) -> tuple[dict[str, float], float]:
    """Returns each device's seconds of work, and the time from the first start to the last end."""
    work = [span for span in spans if span.kind in COMPUTE]
    if not work:
        return {}, 0.0
    work.sort(key=lambda span: span.start_s)
    start_s = work[0].start_s
    worked_s = dict.fromkeys((span.device for span in work), 0.0)
    reached_s = dict.fromkeys(worked_s, start_s)
    for span in work:
        # Only the part of the span after all earlier spans of the device is added:
        #
        #     earlier spans  ------------|
        #     this span           -------+======
        #                        reached_s     end_s
        reached = reached_s[span.device]
        worked_s[span.device] += max(0.0, span.end_s - max(span.start_s, reached))
        reached_s[span.device] = max(span.end_s, reached)
    return worked_s, max(reached_s.values()) - start_s


def _metadata(event: str, row: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": row, "name": event, "args": args}


def sorted_devices(devices: Iterable[str]) -> list[str]:
    """Sorts distinct names of devices; numbers sort by value, so `cpu:2` is before `cpu:10`."""
    return sorted(dict.fromkeys(devices), key=_parts)


def _parts(name: str) -> list[int | str]:
    """Cuts a name into texts and numbers, such as ["cpu:", 10, ""]."""
    # Texts and numbers alternate, so that numbers are compared with numbers.
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
