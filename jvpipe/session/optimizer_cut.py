"""The optimizer in pieces, for the updates of a schedule."""

from dataclasses import dataclass, field
from typing import Any

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.sharding import Sharding
from jvpipe.programs.optimizer import PER_LAYER, OptimizerCut, cut_optimizer, laid_state
from jvpipe.programs.optimizer_trace import TracedOptimizer
from jvpipe.programs.stacked_trace import trace_stacked
from jvpipe.runtime.engine.phases import phase
from jvpipe.schedules import Schedule
from jvpipe.session.settings import Training
from jvpipe.trace.digests import closed_lines
from jvpipe.trace.graph import Traced, freeze
from jvpipe.trace.leaves import abstract
from jvpipe.trace.model import Model
from jvpipe.trace.modules import warn_of_statistics
from jvpipe.trace.stacks import Stacks
from jvpipe.trace.structure import structure

_Readers = tuple[int, ...]


@dataclass(frozen=True)
class OptimizerCutter:
    """Cuts an optimizer into pieces, for whatever layers the parameters are split into; it is traced once for all.

    Args:
        optimizer: any optax transformation.
        params: the parameters' tree, split into layers.
        microbatches: of a step.
        grad_norm: also compute the gradient's norm.
        sharding: how parameters lie over the devices of a place; what an optimizer has of one lies as that does.
        stacks: the optimizer sees these of the parameters as arrays; None: all slices alone.
        frozen: parameters that the user freezes; the optimizer does not see them.
    """

    optimizer: Optimizer
    params: Any
    microbatches: int
    grad_norm: bool
    sharding: Sharding | None = None
    stacks: Stacks | None = None
    frozen: frozenset[int] = frozenset()
    _traced: dict[tuple[_Readers, int | None], TracedOptimizer] = field(
        default_factory=dict, repr=False
    )
    _cuts: dict[tuple[_Readers, _Readers, int | None], OptimizerCut] = field(
        default_factory=dict, repr=False
    )

    @staticmethod
    def of(
        settings: Training,
        model: Model,
        *,
        grad_norm: bool = False,
        sharding: Sharding | None = None,
    ) -> "OptimizerCutter":
        """Makes what cuts the optimizer of a model.

        Args:
            settings: has the optimizer, and what it sees.
            model: has the parameters.
            grad_norm: also compute the gradient's norm.
            sharding: how parameters lie over the devices of a place.
        """
        stacks = model.stacks
        return OptimizerCutter(
            settings.optimizer,
            model.params,
            settings.microbatches,
            grad_norm,
            sharding,
            None if settings.stacked else stacks,
            stacks.slices_named(settings.frozen),
        )

    def cut(self, graph: LayerGraph, schedule: Schedule) -> OptimizerCut:
        """Cuts the optimizer for the layers of a graph, to be run.

        Args:
            graph: the layers that own the parameters.
            schedule: says how many micro-batches an update takes.

        Raises:
            ValueError: it needs a value of all layers at once, and the schedule updates them at different times.
        """
        cut = self.pieces(graph, schedule)
        if not schedule.synchronous and (cut.cross_layer or self.grad_norm):
            name = " and ".join(cut.cross_layer) or "grad_norm=True"
            raise ValueError(
                f"{name} needs a value of all layers at once, which {schedule.name} does not have: its layers are "
                "updated at different times. Use a synchronous schedule (1f1b), or what looks at one parameter at a "
                "time, such as optax.adaptive_grad_clip or optax.clip"
                f"{'. ' + PER_LAYER if self.stacks else ''}"
            )
        return cut

    def pieces(self, graph: LayerGraph, schedule: Schedule) -> OptimizerCut:
        """Cuts the optimizer for the layers of a graph, to be looked at: the schedule may not be able to run it.

        Args:
            graph: the layers that own the parameters.
            schedule: says how many micro-batches an update takes.
        """
        owners = tuple(p.owner for p in graph.parameters)
        readers, microbatches = self._sums(graph, schedule)
        key = owners, readers, microbatches
        if key not in self._cuts:
            with phase("tracing and cutting the optimizer"):
                cut = cut_optimizer(
                    self.optimizer,
                    abstract(self.params),
                    owners,
                    readers,
                    microbatches=microbatches,
                    grad_norm=self.grad_norm,
                    traced=self._trace(readers, microbatches),
                )
                if self.sharding is not None:
                    cut = laid_state(cut, graph.parameters, self.sharding)
                self._cuts[key] = cut
        return self._cuts[key]

    def traced(self, graph: LayerGraph) -> TracedOptimizer:
        """Returns the optimizer, traced for an update of all micro-batches of a step."""
        readers = tuple(len(p.readers) for p in graph.parameters)
        return self._trace(readers, None if graph.weighted else self.microbatches)

    def freeze(self, traced: Traced) -> Traced:
        """Returns the same layers where what the user or the optimizer freezes has no gradient.

        Raises:
            ValueError: a parameter that is left can have no gradient, or none is left.
        """
        try:
            found = self.traced(traced.graph).frozen
        except Exception:
            # Its message names the parameter, that of the optimizer would not.
            freeze(traced, self.frozen)  # perhaps it is given what no optimizer takes, integers
            raise
        left = freeze(traced, found)
        graph = left.graph
        warn_of_statistics(
            [graph.parameters[p].array.name for p in graph.trained(range(len(graph.parameters)))]
        )
        return left

    def text(self, graph: LayerGraph, schedule: Schedule) -> str:
        """Writes the update of a graph's parameters, in words that are mostly the same in every process."""
        # A structure has no names of variables, which differ between processes.
        update = self._trace(*self._sums(graph, schedule)).update.jaxpr
        return repr(structure(update.eqns, update.invars, update.outvars))

    def lines(self, graph: LayerGraph, schedule: Schedule) -> list[str]:
        """Lines that are equal where the optimizer begins and updates the parameters of a graph alike."""
        traced = self._trace(*self._sums(graph, schedule))
        parts = {"update": traced.update, "init": traced.init}
        return [
            f"{name}: {line}" for name, closed in parts.items() for line in closed_lines(closed)
        ]

    def _sums(self, graph: LayerGraph, schedule: Schedule) -> tuple[_Readers, int | None]:
        """Tells how many gradients each parameter has, and by what their sum is divided."""
        readers = tuple(len(p.readers) for p in graph.parameters)
        return readers, None if graph.weighted else schedule.period(self.microbatches)

    def _trace(self, readers: _Readers, microbatches: int | None) -> TracedOptimizer:
        params, key = abstract(self.params), (readers, microbatches)
        if key not in self._traced:
            self._traced[key] = trace_stacked(
                self.optimizer,
                params,
                readers,
                microbatches,
                grad_norm=self.grad_norm,
                stacks=self.stacks,
                frozen=self.frozen,
            )
        return self._traced[key]
