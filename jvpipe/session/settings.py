"""The options of a pipeline, checked: its loss, its optimizer, stages, schedule, limits and devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jvpipe._jax import Device
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.plan import Plan
from jvpipe.ir.reductions import Reductions
from jvpipe.ir.sharding import Sharding
from jvpipe.runtime.hosts import Hosts
from jvpipe.schedules import Schedule


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
