"""A plan that is laid out: which values each layer's programs take and leave under its fates.

This is the first phase of a compiled plan (compiled_plan.py). The fate of a value is to be kept,
swapped to the host or recomputed between forward and backward. A layout has, for each layer, a
forward and a backward that fit together: the forward leaves the residuals that the backward takes.
A plan has one layout, or two if the last micro-batch of a step keeps all values.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from jvpipe.cost.presets import accelerator_of
from jvpipe.cost.recomputed_shares import recomputed_shares
from jvpipe.ir.examples import Batching
from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph, SplitSignature
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import TaskLists
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.placement import Placement
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model_programs import Share, layer_programs
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.inner_layout import laid_graph, laid_programs
from jvpipe.runtime.engine.replicas import Replicas, check_replicas
from jvpipe.schedules.planned import lists_of, pipeline_length
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.graph import Traced
from jvpipe.util.devices import Device, first_of, is_own


@dataclass(eq=False)
class LaidPlan:
    """A plan for one batch shape, with the programs of its layers.

    Args:
        traced: the model.
        plan: the cuts, places and fates of the model's layers.
        schedule: the order of the tasks.
        optimizer: the optimizer's update, cut into pieces.
        microbatches: how many micro-batches a step has.
        devices: the device of each place of the plan.
        store: compiles programs, and keeps them.

    Attributes:
        persistent: the buffers that lie on the devices between steps.
        programs: the programs of all layers, for each layout.
        replicas: the programs on slices of a micro-batch; None unless replicas work on slices.

    Raises:
        ValueError: the plan does not fit the schedule or the number of micro-batches.
    """

    traced: Traced
    plan: Plan
    schedule: Schedule
    optimizer: OptimizerCut
    microbatches: int
    devices: tuple[Device, ...]
    store: ProgramStore

    def __post_init__(self) -> None:
        if self.plan.keep_last and not self.schedule.synchronous:
            raise ValueError(
                f"checkpoint='except_last' means nothing under {self.schedule.name}: "
                "a stream has no last micro-batch"
            )
        self.schedule.check(pipeline_length(self.plan, self.schedule), self.microbatches)
        graph = self.traced.graph
        where = Placement(graph, self.plan, self.optimizer)
        self.persistent = where.lasting
        fates = Fates.of(graph, self.plan)
        # For each layout, the fates that say which residuals it keeps, or "all". If there is a
        # second layout, it is that of the last micro-batch.
        shares: list[Share | Fates] = [fates]
        if self.plan.keep_last:
            shares.append("all")
        self.programs = [self._layer_programs(share) for share in shares]
        self.replicas: Replicas | None = None
        if self.plan.replicated:
            check_replicas(self.plan, self.schedule, graph, self.microbatches)
        # In a synchronous schedule, each replica works on a slice of every micro-batch. In an
        # asynchronous one, replicas take turns with whole micro-batches, and nothing is sliced.
        if self.plan.replicated and self.schedule.synchronous:
            whole = list(zip(shares, self.programs, strict=True))
            self.replicas = Replicas(self.traced, where, self.store, whole)

    @cached_property
    def graph(self) -> LayerGraph:
        """The model's layers.

        If places are meshes, each tensor between layers has a spec, which says how it is cut over
        the devices of a mesh. With replicas, each device of a mesh has the whole tensor.
        """
        group = self._group
        return laid_graph(self.store, self.traced, group) if group else self.traced.graph

    @property
    def _group(self) -> Device | None:
        """A mesh of this process, if tensors between layers are cut over meshes; else None.

        Any mesh will do, because all have the same axes.
        """
        is_laid = self.traced.loss.sharding and not self.plan.replicated
        return next(filter(is_own, self.devices)) if is_laid else None

    def _layer_programs(self, share: Share | Fates) -> tuple[LayerPrograms, ...]:
        """Makes the programs of all layers for a layout, which keeps the given residuals."""
        programs = layer_programs(self.store, self.traced, share)
        group, sharding = self._group, self.traced.loss.sharding
        if not (group and sharding):
            return programs
        return laid_programs(self.store, self.graph, programs, group, sharding)

    @cached_property
    def recomputed_shares(self) -> list[float]:
        """By layer, the estimated share of its backward's time that computes values again."""
        device = accelerator_of(first_of(self.devices[0]))
        return recomputed_shares(self.store, self.traced, self.plan, device)

    @cached_property
    def lists(self) -> TaskLists:
        """The tasks of each device in a synchronous step."""
        return lists_of(self.plan, self.schedule, self.microbatches)

    @cached_property
    def _halves(self) -> list[dict[int, SplitSignature]]:
        """For each layout, the signatures of the two halves of split backwards, by layer.

        The half I of a backward gives the cotangents of the layer's inputs. The half W adds the
        gradients of its parameters to their sums.
        """
        by_layout: list[dict[int, SplitSignature]] = [{} for _ in self.programs]
        if not self._splits:
            return by_layout
        for signatures, programs in zip(by_layout, self.programs, strict=True):
            for layer, of_layer in enumerate(programs):
                if of_layer.halves and layer not in self.plan.unsplit:
                    signatures[layer] = of_layer.halves.signature
        return by_layout

    @property
    def _splits(self) -> bool:
        """Whether a synchronous step has backwards in two halves."""
        if not self.schedule.synchronous:
            return False
        tasks = chain(*self.lists)
        return any(task.kind is Kind.I for task in tasks)

    def layouts(self, first: int = 0) -> list[MicrobatchLayout]:
        """Returns the layout of each micro-batch of a step.

        Under `checkpoint="except_last"` the last micro-batch keeps every value, so it has a layout
        of its own.

        Args:
            first: the number of this plan's first layout, by which rows name it. It is 0, unless
                earlier micro-batches run under other plans. Their layouts then have the numbers
                below `first`.
        """
        plans = [self.plan]
        if self.plan.keep_last:
            plans.append(self.plan.without_fates())
        layouts = [self._layout(i, first + i, plan) for i, plan in enumerate(plans)]
        usual, *last = layouts
        others = self.microbatches - len(last)
        return [*[usual] * others, *last]

    def _layout(self, index: int, number: int, plan: Plan) -> MicrobatchLayout:
        """Makes a layout.

        Args:
            index: the position of its programs in `programs`.
            number: the number by which rows name it.
            plan: the plan with the fates of its values.
        """
        halves = self._halves[index]
        signatures = [programs.signature for programs in self.programs[index]]
        slices = self.replicas.layouts(index, halves) if self.replicas else {}
        fates = Fates.of(self.graph, plan)
        return MicrobatchLayout(
            number,
            self.graph,
            self.plan,
            fates,
            signatures,
            halves,
            slices,
        )

    @property
    def batching(self) -> Batching | None:
        """How values depend on a micro-batch's examples; None unless replicas work on slices.

        For instance, an activation has a part for each example, and a loss is a mean over examples.
        """
        return self.replicas.batching if self.replicas else None
