"""The models that a pipeline has met: each is traced and planned once, so that one that comes back costs nothing."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from threading import RLock
from typing import Any

import jax

from jvpipe.ir.plan import Plan
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.model_change import ModelSwitch, Parked, plan_model_switch
from jvpipe.runtime.tensors import Limits
from jvpipe.schedules.planned import pipeline_length
from jvpipe.session.batches import micro_batch_shapes, shapes_of
from jvpipe.session.compiled_plans import CompiledPlans
from jvpipe.trace.leaves import abstract

Tree = Any
Loss = Callable[..., Any]
REMEMBERED = 64
"""How many models are remembered; those that were asked for longest ago are forgotten."""


class KnownModels:
    """Remembers compiled plans by the loss they were traced from (that very object) and the shapes of its parameters.

    `parked` are arrays on the host that the present model lacks.
    """

    def __init__(self, store: ProgramStore) -> None:
        self._store = store
        self._known: OrderedDict[Hashable, CompiledPlans] = OrderedDict()
        self._lock = RLock()  # a model may be prepared in the background
        self.parked: Parked = {}

    def compiled_for(
        self, present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree
    ) -> CompiledPlans:
        """Finds the compiled plans of a loss; one that is new is traced at the present one's batch and planned.

        Args:
            present: those of the model that is trained.
            loss_fn: the very object that is looked for.
            params: arrays or shapes.
            model_state: likewise; by default the present one's.

        Raises:
            ValueError: the loss reads a parameter that `params` lack, or what `Pipeline.init` refuses.
        """
        trees = present.trees
        params, model_state = (
            abstract(params),
            trees.model_state if model_state is None else abstract(model_state),
        )
        key = self._key(present, loss_fn, params, model_state)
        with self._lock:
            self._known[
                self._key(present, present.settings.loss_fn, trees.params, trees.model_state)
            ] = present
            if key not in self._known:
                self._known[key] = self._traced(present, loss_fn, params, model_state)
            self._known.move_to_end(key)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return self._known[key]

    def plan_switch(
        self,
        old: CompiledPlans,
        new: CompiledPlans,
        params: Tree,
        model_state: Tree,
        limits: Limits,
    ) -> ModelSwitch:
        """Plans how one model takes over from another; raises what `plan_model_switch` raises.

        Args:
            old: those of the present model.
            new: those of the one that takes over.
            params: values, for the parameters that are new.
            model_state: likewise.
            limits: kept at every instant.
        """
        given = {
            "parameter": jax.tree.leaves(new.trees.stacks.split(params)),
            "state": jax.tree.leaves(model_state),
        }
        return plan_model_switch(old.current, new.current, given, self.parked, limits)

    def _traced(
        self, present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree
    ) -> CompiledPlans:
        settings = replace(present.settings, loss_fn=loss_fn)
        if isinstance(settings.stages, Plan) or settings.shares:  # for the layers of another model
            plan = settings.stages if isinstance(settings.stages, Plan) else present.current.plan
            places = tuple(stage.devices[0] for stage in plan.stages)
            length = pipeline_length(plan, settings.schedule)
            replicas = tuple(stage.devices for stage in plan.stages) if plan.replicated else ()
            settings = replace(
                settings, stages=length, places=places, shares=False, replicas=replicas
            )
        compiled_plans, trees = CompiledPlans(settings, self._store, present), present.trees
        try:
            compiled_plans.trace(params, trees.batch, trees.rng, model_state)
        except KeyError as error:
            micro = micro_batch_shapes(trees.batch, settings.microbatches)
            rest = (model_state, micro, trees.rng) if settings.has_state else (micro, trees.rng)
            path = _missing(loss_fn, params, *rest) or error.args[0]
            raise ValueError(
                f"the new loss reads parameter '{path}', which params lack: give a value for every parameter that it "
                "reads (of those that are kept the value does not matter)"
            ) from error
        return compiled_plans

    @staticmethod
    def _key(present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree) -> Hashable:
        return id(loss_fn), *map(shapes_of, (params, present.trees.batch, model_state))


class _MissingError(Exception):
    pass


class _Watched(dict[Any, Any]):
    """A part of the parameters that tells what is looked for in vain."""

    path: tuple[Any, ...] = ()

    def __missing__(self, key: Any) -> Any:
        raise _MissingError("/".join(map(str, (*self.path, key))))


def _missing(loss_fn: Loss, params: Tree, *rest: Any) -> str | None:
    """The path of the first parameter that a loss looks for in vain; None if that cannot be told."""

    def watched(tree: Tree, path: tuple[Any, ...]) -> Tree:
        if not isinstance(tree, Mapping):
            return tree
        watching = _Watched({key: watched(value, (*path, key)) for key, value in tree.items()})
        watching.path = path
        return watching

    try:
        jax.eval_shape(lambda params, *rest: loss_fn(watched(params, ()), *rest), params, *rest)
    except _MissingError as missing:
        return str(missing)
    except Exception:
        return None
    return None
