"""The options of a pipeline, checked, and what of them all processes of a run must have alike."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import jax

from jvpipe._jax import Device
from jvpipe.ir.buffers import Peak
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.plan import Plan
from jvpipe.ir.reductions import Reductions
from jvpipe.ir.sharding import Sharding
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.schedules import Schedule
from jvpipe.trace.digests import (
    array_digest,
    leaf_lines,
    made_lines,
    shape_lines,
    without_addresses,
)
from jvpipe.trace.leaves import is_initialiser


@dataclass(frozen=True)
class Settings:
    """The options of a `jvpipe.Pipeline`, as they hold for every model that it trains.

    Args:
        loss_fn: the loss of the first model.
        optimizer: as it was given.
        stages: the devices that the pipeline passes, or a plan for the first model's layers; None where `shares` has
            their number decided.
        microbatches: how many a batch is split into.
        schedule: in which order they run.
        planner: the name of what chooses cuts and fates.
        limits: in bytes, what each device may hold; none: there is no limit.
        host_limit_bytes: for swapped and parked values on the host.
        fates: of tensors, by patterns of their names.
        state_fates: of the optimizer's state, by patterns of the paths of parameters.
        checkpoint: torchgpipe's mode.
        devices: the distinct ones.
        places: the device of each stage, as an index; empty if a plan was given.
        replicas: of each stage all devices, if one has several.
        shares: how many devices each stage has is decided.
        sharding: how parameters lie over the devices of a place, if there are several.
        stacked: "per_layer" if the optimizer sees slices of the layers that a scan stacks, None if arrays.
        frozen: patterns of parameters that nothing updates.
        reductions: what is said of leaves of aux and of the model state.
        has_aux: the loss returns something beside.
        has_state: the loss carries a model state.
        grad_norm: also report the global norm of the gradient.
        remeasure: measure anew what an earlier process has measured.
        hosts: the processes of the run, if there are several.
        speeds: how fast each device is beside the others; none: what is measured tells.
    """

    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    stages: int | Plan | None
    microbatches: int
    schedule: Schedule
    planner: str
    limits: tuple[int, ...]
    host_limit_bytes: int | None
    fates: Mapping[str, str]
    checkpoint: str | None
    devices: tuple[Device, ...]
    places: tuple[int, ...]
    has_aux: bool
    has_state: bool
    grad_norm: bool
    remeasure: bool = False
    hosts: Hosts | None = None
    speeds: tuple[float, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()
    shares: bool = False
    sharding: Sharding | None = None
    stacked: str | None = None
    frozen: tuple[str, ...] = ()
    state_fates: Mapping[str, str] = field(default_factory=dict)
    reductions: Reductions = field(default_factory=Reductions)

    def __str__(self) -> str:
        loss = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        how = f"{self.microbatches} micro-batches, {self.schedule.name}, planner {self.planner}"
        return f"{loss}, {how}, {len(self.devices)} devices"


# What all processes of a run must have alike, part by part, so that a difference can be named.

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
    own = leaf_lines(jax.tree.map(_unread, batch), "batch leaf")
    every = [json.loads(told) for told in hosts.exchange("batch", json.dumps(own).encode())]
    by_all = [i for i, shape in enumerate(shapes) if all(lines[i] != shape for lines in every)]
    hosts.agree(
        "what init is given", [("the values of the batch", "\n".join(own[i] for i in by_all))]
    )


def _unread(leaf: Any) -> Any:
    """A leaf as it is, of one that is read lazily the shape: whoever needs nothing of it is not to read it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, LazyArray) else leaf


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
