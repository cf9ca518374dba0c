"""What all processes of a run must have alike, part by part, so that a difference can be named."""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax

from jvpipe.ir.buffers import Peak
from jvpipe.ir.plan import Plan
from jvpipe.runtime.compiled_plan import CompiledPlan
from jvpipe.runtime.hosts import Hosts
from jvpipe.session.settings import Settings
from jvpipe.trace.digests import (
    array_digest,
    leaf_lines,
    made_lines,
    shape_lines,
    without_addresses,
)
from jvpipe.trace.leaves import is_initialiser

Tree = Any
Parts = list[tuple[str, str]]
"""The name of each part, and a text that is equal where the part is: one thought per line."""


def versions() -> Parts:
    """The versions of what computes."""
    names = ("jax", "jaxlib", "jvpipe")
    return [*((name, version(name)) for name in names), ("python", platform.python_version())]


def option_parts(settings: Settings) -> Parts:
    """The options of a pipeline, but for its functions, which are compared once they are traced."""
    stages = settings.stages
    devices = [device.device_kind for device in settings.devices]
    options = {
        "stages": stages.to_json() if isinstance(stages, Plan) else stages,
        "microbatches": settings.microbatches,
        "schedule": settings.schedule.name,
        "its options": settings.schedule.options,
        "planner": settings.planner,
        "devices": devices,
        "places": settings.places,
        "replicas": "auto" if settings.shares else settings.replicas,
        "memory_limit": settings.limits,
        "host_memory_limit": settings.host_limit_bytes,
        "fates": sorted(settings.fates.items()),
        "state_fates": sorted(settings.state_fates.items()),
        "checkpoint": settings.checkpoint,
        "speeds": settings.speeds,
        "sharding": settings.sharding,
        "has_aux": settings.has_aux,
        "has_state": settings.has_state,
        "grad_norm": settings.grad_norm,
        "stacked": settings.stacked,
        "frozen": settings.frozen,
        "aux_reduce and model_state_reduce": settings.reductions,
    }
    told = [(name, without_addresses(str(value))) for name, value in options.items()]
    return [*versions(), *told]


def agree_on_given(
    hosts: Hosts, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree
) -> None:
    """Makes sure that all processes begin a run with the same.

    Of parameters and model state every byte is compared, of parameters that a function makes how it makes each; of
    the batch the shapes, and the bytes of the leaves that every process gives as arrays. Batches of later steps are
    not: to read them all would take longer than some steps.

    Args:
        hosts: the processes.
        params: arrays, or a function that makes them.
        batch: a batch, or its shapes.
        rng: the key of the run.
        model_state: arrays.

    Raises:
        Disagreement: something differs.
    """
    if is_initialiser(params):
        assert rng is not None
        parameters = made_lines(params, rng)
    else:
        parameters = leaf_lines(params)
    shapes = shape_lines(batch, "batch leaf")
    given: Parts = [
        ("the key", "None" if rng is None else f"{rng.dtype} {array_digest(rng)}"),
        ("the batch", "\n".join(shapes)),
        ("parameters", "\n".join(parameters)),
        ("model state", "\n".join(leaf_lines(model_state, "leaf of the model state"))),
    ]
    hosts.agree("what init is given", given)
    own = leaf_lines(batch, "batch leaf")
    every = [json.loads(told) for told in hosts.exchange("batch", json.dumps(own).encode())]
    by_all = [i for i, shape in enumerate(shapes) if all(lines[i] != shape for lines in every)]
    hosts.agree(
        "what init is given", [("the values of the batch", "\n".join(own[i] for i in by_all))]
    )


def agreed_rows(compiled: CompiledPlan) -> Parts:
    """The lowered rows, once they are bound."""
    return [(f"rows {i}", "\n".join(rows)) for i, rows in enumerate(compiled.whole_rows)]


def told_peaks(hosts: Hosts, own: Sequence[Peak]) -> list[Peak]:
    """The most bytes on each device, and last on the host, as the processes that have them tell.

    Args:
        hosts: the processes.
        own: what this one knows; nothing of the others' devices.
    """
    told = [
        json.loads(each)
        for each in hosts.exchange("peaks", json.dumps([peak.bytes for peak in own]).encode())
    ]
    return [Peak(max(sizes), None, ()) for sizes in zip(*told, strict=True)]
