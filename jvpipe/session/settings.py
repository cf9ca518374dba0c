"""The settings of a pipeline, and a class that cuts its optimizer into one piece per layer."""

import platform
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.plan import Plan
from jvpipe.ir.reductions import Reductions
from jvpipe.ir.sharding import Sharding
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.planner import FateRule
from jvpipe.programs.optimizer_pieces import PER_LAYER, OptimizerCut, cut_optimizer, laid_state
from jvpipe.programs.optimizer_trace import TracedOptimizer
from jvpipe.programs.stacked_trace import trace_stacked
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.phases import phase
from jvpipe.schedules import Schedule
from jvpipe.schedules.planned import pipeline_length
from jvpipe.trace.digests import jaxpr_lines, without_addresses
from jvpipe.trace.graph import Traced, freeze
from jvpipe.trace.leaves import abstract
from jvpipe.trace.modules import warn_of_statistics
from jvpipe.trace.stacks import Stacks
from jvpipe.util.devices import Device

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a training run that do not depend on devices.

    Args:
        loss_fn: the loss of the first model.
        optimizer: the optimizer as the user gave it.
        microbatches: how many micro-batches a batch is split into.
        schedule: the order in which micro-batches run.
        has_aux: whether the loss also returns auxiliary values.
        has_state: whether the loss takes and returns a model state.
        stacked: "per_layer" if the optimizer sees a parameter for each layer of a scan;
            None if it sees the stacked arrays.
        frozen: patterns of parameters that are not updated.
        state_fates: the fates of the optimizer's state, by patterns of the paths of parameters.
        sharding: how parameters are sharded over the devices of a place, if places are meshes.
        grad_norm: whether to report the global norm of the gradient.
        whole_layers: whether layers are recomputed by their own forward programs.
    """

    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    microbatches: int
    schedule: Schedule
    has_aux: bool = False
    has_state: bool = False
    stacked: str | None = None
    frozen: tuple[str, ...] = ()
    state_fates: Mapping[str, str] = field(default_factory=dict)
    sharding: Sharding | None = None
    grad_norm: bool = False
    whole_layers: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """The options of a `jvpipe.Pipeline`, which hold for every model that it trains.

    Args:
        stages: how many devices a micro-batch passes (a device may run several stages), or a plan
            for the first model's layers; None if the planner decides (`shares`).
        planner: the name of the planner, which chooses cuts and fates.
        limits: the bytes that each device may hold; empty if there is no limit.
        host_limit_bytes: the limit for swapped and parked values on the host.
        fates: the fates of tensors, by patterns of their names.
        checkpoint: which micro-batches are recomputed from their stage's input, as a mode of
            torchgpipe. None lets `fates` or the planner decide.
        devices: the distinct devices. Other fields refer to devices by index.
        places: the device of each stage, as an index; empty if a plan was given.
        splits_unasked: whether batches are split by default, because the user left out
            `microbatches`.
        replicas: all devices of each stage, as indices; empty unless some stage has several.
        shares: whether the planner decides how many devices each stage has.
        reductions: the user's reductions for leaves of aux and of the model state.
        deferred_batch_norm: whether running statistics of batch norms change once per batch.
        remeasure: whether to ignore the measurements of earlier processes.
        group: whether consecutive layers of a stage run as one program; None: see `Grouping`.
        hosts: the processes of the run, if there are several.
        speeds: the relative speed of each device; empty if speeds are measured.
    """

    stages: int | Plan | None
    planner: str
    limits: tuple[int, ...]
    host_limit_bytes: int | None
    fates: Mapping[str, str]
    checkpoint: str | None
    devices: tuple[Device, ...]
    places: tuple[int, ...]
    splits_unasked: bool
    replicas: tuple[tuple[int, ...], ...]
    shares: bool
    reductions: Reductions
    deferred_batch_norm: bool
    remeasure: bool
    group: bool | None
    hosts: Hosts | None
    speeds: tuple[float, ...]

    @property
    def chooses_fates(self) -> bool:
        """Whether the planner chooses fates; only some planners do, and only under a limit."""
        return bool(self.limits) and find_planner(self.planner).chooses_fates

    @property
    def asks_fates(self) -> bool:
        """Whether layers are also measured with their values recomputed or swapped.

        This is needed if the planner chooses fates, or recomputes all values.
        """
        return self.chooses_fates or find_planner(self.planner).fate_rule is FateRule.RECOMPUTES

    def for_another(self, loss_fn: Callable[..., Any], plan: Plan) -> "Settings":
        """Returns the settings for another model, on the devices of the present one.

        Args:
            loss_fn: the loss of the other model.
            plan: the present plan. The other model has other layers, so it uses only the plan's
                devices.
        """
        settings = replace(self, loss_fn=loss_fn)
        if not isinstance(self.stages, Plan) and not self.shares:
            return settings
        plan = self.stages if isinstance(self.stages, Plan) else plan
        return replace(
            settings,
            stages=pipeline_length(plan, self.schedule),
            places=tuple(stage.devices[0] for stage in plan.stages),
            shares=False,
            replicas=tuple(stage.devices for stage in plan.stages) if plan.replicated else (),
        )

    def __str__(self) -> str:
        loss = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        several = "es" if self.microbatches > 1 else ""
        how = f"{self.microbatches} micro-batch{several}, {self.schedule.name}, planner {self.planner}"
        return f"{loss}, {how}, {len(self.devices)} devices"


# All processes of a run must have equal settings. Settings are compared in parts, so that a message
# can name the part that differs.

Parts = list[tuple[str, str]]
"""The name and the text of each part. Parts are equal if and only if their texts are equal. A
message shows the first differing line, so lines should be short."""


def library_versions() -> Parts:
    """Returns the versions of the packages that results depend on, and of Python."""
    names = ("jax", "jaxlib", "jvpipe")
    return [*((name, version(name)) for name in names), ("python", platform.python_version())]


def option_parts(settings: Settings) -> Parts:
    """Returns a pipeline's options without its functions, whose traces are compared later."""
    apart = ("loss_fn", "optimizer", "hosts")
    names = [one.name for one in fields(settings) if one.name not in apart]
    # All other fields are included, so that new fields are compared automatically.
    values = {name: getattr(settings, name) for name in names}
    stages, schedule = settings.stages, settings.schedule
    values |= {
        "stages": stages.to_json() if isinstance(stages, Plan) else stages,
        "schedule": schedule.name,
        "options of the schedule": schedule.options,
        "memory_limit": values.pop("limits"),
        "host_memory_limit": values.pop("host_limit_bytes"),
        "devices": [device.device_kind for device in settings.devices],
    }
    parts = [(name, without_addresses(str(value))) for name, value in values.items()]
    return [*library_versions(), *parts]


# Each layer is updated on its own device, so the optimizer is cut into one piece per layer.

_Readers = tuple[int, ...]
"""A number for each parameter: its count of readers, or the layer that owns it."""


@dataclass(frozen=True)
class OptimizerCutter:
    """Cuts an optimizer into one piece for each layer, for any cuts of the model into layers.

    The optimizer is cut again if the layers change. It is traced again only if a parameter's number
    of readers, or the number of micro-batches per update, changes.

    Args:
        settings: has the optimizer, and the options of how it sees parameters.
        params: the tree of parameters, with stacked ones split into layers.
        stacks: lists the stacked parameters.
    """

    settings: Training
    params: Any
    stacks: Stacks
    _traced: dict[Hashable, TracedOptimizer] = field(default_factory=dict, repr=False)
    _cuts: dict[Hashable, OptimizerCut] = field(default_factory=dict, repr=False)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """The parameters that the user freezes; the optimizer does not see them."""
        return self.stacks.slices_named(self.settings.frozen)

    @property
    def _seen(self) -> Stacks | None:
        """The parameters that the optimizer sees as stacked arrays.

        None if the optimizer sees the slice of each layer as a parameter.
        """
        return None if self.settings.stacked else self.stacks

    def cut(self, graph: LayerGraph, schedule: Schedule) -> OptimizerCut:
        """Cuts the optimizer for the layers of a graph, into pieces that the schedule can run.

        Args:
            graph: the layers that own the parameters.
            schedule: says how many micro-batches an update has.

        Raises:
            ValueError: the optimizer needs a value of all layers at once, and the schedule
                updates layers at different times.
        """
        cut = self.pieces(graph, schedule)
        if not schedule.synchronous and (cut.cross_layer or self.settings.grad_norm):
            name = " and ".join(cut.cross_layer) or "grad_norm=True"
            instead = (
                "what looks at one parameter at a time, such as optax.adaptive_grad_clip or "
                f"optax.clip{'. ' + PER_LAYER if self._seen else ''}"
            )
            if "loss_scale_of_float16" in cut.cross_layer:
                name, instead = "the loss scale of float16", "bfloat16, which needs none"
            raise ValueError(
                f"{name} needs a value of all layers at once, which {schedule.name} does "
                "not have: its layers are updated at different times. Use a synchronous "
                f"schedule (1f1b), or {instead}"
            )
        return cut

    def pieces(self, graph: LayerGraph, schedule: Schedule) -> OptimizerCut:
        """Cuts the optimizer for the layers of a graph, even if the schedule cannot run the pieces.

        Args:
            graph: the layers that own the parameters.
            schedule: says how many micro-batches an update has.
        """
        owners = tuple(p.owner for p in graph.parameters)
        sums = readers, microbatches, _ = self._sums(graph, schedule)
        key = owners, *sums
        if key not in self._cuts:
            with phase("tracing and cutting the optimizer"):
                cut = cut_optimizer(
                    self.settings.optimizer,
                    abstract(self.params),
                    owners,
                    readers,
                    microbatches=microbatches,
                    grad_norm=self.settings.grad_norm,
                    traced=self._trace(*sums),
                    stacks=self._seen,
                )
                # A parameter's optimizer state is sharded like the parameter.
                if (sharding := self.settings.sharding) is not None:
                    cut = laid_state(cut, graph.parameters, sharding)
                self._cuts[key] = cut
        return self._cuts[key]

    def freeze(self, traced: Traced) -> Traced:
        """Removes the gradients of parameters that the user or the optimizer freezes.

        Raises:
            ValueError: a trained parameter cannot have a gradient, or no parameter is trained.
        """
        frozen = self.frozen
        try:
            found = self._trace(*self._sums(traced.graph, self.settings.schedule)).frozen
        except Exception:
            # The optimizer may have failed because a parameter has integers. If so, `freeze` raises
            # a better error, which names the parameter.
            freeze(traced, frozen)
            raise
        left = freeze(traced, found)
        parameters = left.graph.parameters
        trained = left.graph.trained(range(len(parameters)))
        warn_of_statistics([parameters[p].array.name for p in trained])
        return left

    def lines(self, graph: LayerGraph, schedule: Schedule) -> list[str]:
        """Returns the traced optimizer as lines; equal lines mean equal states and updates."""
        traced = self._trace(*self._sums(graph, schedule))
        lines: list[str] = []
        for name, closed in (("update", traced.update), ("init", traced.init)):
            lines += [f"{name}: {line}" for line in jaxpr_lines(closed.jaxpr, closed.consts)]
        return lines

    def _sums(self, graph: LayerGraph, schedule: Schedule) -> tuple[_Readers, int | None, str]:
        """Returns the number of summed gradients of each parameter, their divisor, and its type.

        The divisor is the number of micro-batches per update. It is None if the loss is a
        `Weighted`, because the sum of the weights is then the divisor.
        """
        readers = tuple(len(p.readers) for p in graph.parameters)
        divisor = None if graph.weighted else schedule.period(self.settings.microbatches)
        return readers, divisor, graph.weight_type

    def _trace(
        self, readers: _Readers, microbatches: int | None, weight_type: str
    ) -> TracedOptimizer:
        key = readers, microbatches, weight_type
        if key not in self._traced:
            self._traced[key] = trace_stacked(
                self.settings.optimizer,
                abstract(self.params),
                readers,
                microbatches,
                weight_type=weight_type,
                grad_norm=self.settings.grad_norm,
                stacks=self._seen,
                frozen=self.frozen,
            )
        return self._traced[key]
