"""What all processes of a run must have alike, part by part, so that a difference can be named."""

import json
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version

from jvpipe.ir.buffers import Peak
from jvpipe.runtime.compiled_plan import CompiledPlan
from jvpipe.runtime.hosts import Hosts
from jvpipe.session.settings import Settings

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def versions() -> list[tuple[str, str]]:
    """The versions of what computes."""
    names = ("jax", "jaxlib", "jvpipe")
    return [*((name, version(name)) for name in names), ("python", platform.python_version())]


def agreed_parts(compiled: CompiledPlan, settings: Settings) -> list[tuple[str, str]]:
    """The name of each part, and a text that is equal where the part is."""
    graph, plan = compiled.traced.graph, compiled.plan
    return [
        *versions(),
        ("devices", str([device.device_kind for device in settings.devices])),
        ("memory limit", str(settings.limits)),
        ("speeds", str(settings.speeds)),
        ("host memory limit", str(settings.host_limit_bytes)),
        ("schedule", str(compiled.schedule.options)),
        ("microbatches", str(compiled.microbatches)),
        ("reductions", str((graph.aux_chosen, graph.state_chosen))),
        ("parameters", str([p.array for p in graph.parameters])),
        ("batch", str(graph.batch)),
        ("loss", _ADDRESS.sub("", str(compiled.traced.loss.jaxpr))),
        ("optimizer", str([(piece.layer, piece.reads, piece.writes) for piece in compiled.optimizer.update])),
        ("plan", str(plan.to_json())),
    ]


def agreed_rows(compiled: CompiledPlan) -> list[tuple[str, str]]:
    """The same of the lowered rows, once they are bound."""
    return [(f"rows {i}", "\n".join(rows)) for i, rows in enumerate(compiled.whole_rows)]


def told_peaks(hosts: Hosts, own: Sequence[Peak]) -> list[Peak]:
    """The most bytes on each device, and last on the host, as the processes that have them tell.

    Args:
        hosts: the processes.
        own: what this one knows; nothing of the others' devices.
    """
    told = [json.loads(each) for each in hosts.exchange("peaks", json.dumps([peak.bytes for peak in own]).encode())]
    return [Peak(max(sizes), None, ()) for sizes in zip(*told, strict=True)]
