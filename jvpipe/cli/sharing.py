"""What the processes of a run tell one another after each step: what they measured, and whether one is to stop."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from jvpipe.ir.kinds import Kind
from jvpipe.ir.span import Hop, Level, Picture, Span
from jvpipe.report.metrics import StepMetrics
from jvpipe.report.timeline import Busy
from jvpipe.runtime.hosts import Hosts

Own = tuple[StepMetrics, Busy]
"""The metrics of a step as one process saw it, and how busy its devices were."""


def shared(
    hosts: Hosts, signum: int | None, own: Own | None
) -> tuple[int | None, StepMetrics | None]:
    """Tells all processes of a step; returns the signal that any of them was sent, and the metrics of all.

    Args:
        hosts: this process and the others.
        signum: the signal that this one was sent.
        own: what it saw of the step, if there was one.
    """
    if hosts.count == 1:
        return signum, own and own[0]
    mine = [signum, own and [asdict(own[0]), own[1]]]
    told = [json.loads(x) for x in hosts.exchange("step", json.dumps(mine).encode())]
    heard = next((each for each, _ in told if each is not None), None)
    return heard, own and _merged(
        own[0], [(_metrics(line), Busy(*busy)) for _, (line, busy) in told]
    )


def _metrics(told: Mapping[str, Any]) -> StepMetrics:
    return StepMetrics(
        **{
            **told,
            "staleness": tuple(told["staleness"]),
            "architecture": tuple(told["architecture"]),
        }
    )


def _merged(own: StepMetrics, every: Sequence[Own]) -> StepMetrics:
    """The metrics of a step over all processes: the slowest one's seconds, the bytes and copies of all devices."""
    lines, work = [line for line, _ in every], [busy for _, busy in every]
    all_work = Busy(
        sum(b.seconds for b in work), max(b.elapsed_s for b in work), sum(b.devices for b in work)
    )
    return replace(
        own,
        seconds=max(line.seconds for line in lines),
        examples_per_s=min(line.examples_per_s for line in lines),
        tokens_per_s=_least(line.tokens_per_s for line in lines),
        mfu=_least(line.mfu for line in lines),
        bubble_fraction=all_work.bubble_fraction,
        peak_bytes={
            device: max(line.peak_bytes[device] for line in lines) for device in own.peak_bytes
        },
        busy_fraction={name: share for line in lines for name, share in line.busy_fraction.items()},
        swapped_bytes=sum(line.swapped_bytes for line in lines),
        copy_hidden_s=sum(line.copy_hidden_s for line in lines),
        copy_exposed_s=sum(line.copy_exposed_s for line in lines),
        recomputed_s=sum(line.recomputed_s for line in lines),
    )


def _least(rates: Iterable[float | None]) -> float | None:
    """The least of what is known."""
    return min((rate for rate in rates if rate is not None), default=None)


def shared_picture(hosts: Hosts, picture: Picture) -> Picture:
    """The pictures of all processes as one; their clocks meet where all have heard of all."""
    if hosts.count == 1:
        return picture
    hosts.exchange("clock", b"")
    zero_s = time.perf_counter()
    spans = [
        [s.device, s.name, s.start_s - zero_s, s.end_s - zero_s, s.kind, dict(s.args)]
        for s in picture.spans
    ]
    rest = [
        [x._replace(at_s=x.at_s - zero_s) for x in part] for part in (picture.levels, picture.hops)
    ]
    told = [json.loads(x) for x in hosts.exchange("timeline", json.dumps([spans, *rest]).encode())]
    all_spans, levels, hops = ([row for each in told for row in each[part]] for part in range(3))
    return Picture(
        tuple(
            Span(device, name, start_s, end_s, Kind(kind), args)
            for device, name, start_s, end_s, kind, args in all_spans
        ),
        tuple(Level(*row) for row in levels),
        tuple(Hop(*row) for row in hops),
    )
