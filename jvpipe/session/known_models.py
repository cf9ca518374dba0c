"""The models that a pipeline has met: each is traced and planned once, so that one that comes back costs nothing."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from threading import RLock
from typing import Any

import jax

from jvpipe.ir.plan import Plan
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.model_change import Parked, Takeover, prepare_takeover
from jvpipe.runtime.tensors import Limits
from jvpipe.session.arguments import batch_shapes, micro_batch_shapes
from jvpipe.session.compiled_plans import Builds
from jvpipe.trace.leaves import abstract

Tree = Any
Loss = Callable[..., Any]
REMEMBERED = 64
"""How many models are remembered; those that were asked for longest ago are forgotten."""


class KnownModels:
    """Builds by the loss function they were traced from (that very object) and the shapes of its parameters.

    `parked` are arrays on the host that the present model lacks.
    """

    def __init__(self, store: ProgramStore) -> None:
        self._store = store
        self._found: OrderedDict[Hashable, Builds] = OrderedDict()
        self._lock = RLock()  # a model may be prepared in the background
        self.parked: Parked = {}

    def of(self, present: Builds, loss_fn: Loss, params: Tree, model_state: Tree) -> Builds:
        """The builds of a loss, traced at the present one's batch and planned anew if it has not been met.

        Raises:
            ValueError: the loss reads a parameter that `params` lack, or what `Pipeline.init` refuses.
        """
        _, rng, old_state = present.inputs
        params, model_state = abstract(params), old_state if model_state is None else abstract(model_state)
        key = self._key(present, loss_fn, params, model_state)
        with self._lock:
            self._found[self._key(present, present.settings.loss_fn, present.inputs[0], old_state)] = present
            if key not in self._found:
                self._found[key] = self._made(present, loss_fn, params, rng, model_state)
            self._found.move_to_end(key)
            while len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
            return self._found[key]

    def takeover(self, old: Builds, new: Builds, params: Tree, model_state: Tree, limits: Limits) -> Takeover:
        """How one model takes over from another; what `prepare_takeover` raises, this raises."""
        given = {"parameter": jax.tree.leaves(new.stacks.split(params)), "state": jax.tree.leaves(model_state)}
        return prepare_takeover(old.first, new.first, given, self.parked, limits)

    def _made(self, present: Builds, loss_fn: Loss, params: Tree, rng: jax.Array | None, model_state: Tree) -> Builds:
        settings = replace(present.settings, loss_fn=loss_fn)
        if isinstance(settings.stages, Plan):  # it was given for the layers of another model
            stages = settings.stages.stages
            settings = replace(settings, stages=len(stages), places=tuple(stage.devices[0] for stage in stages))
        builds = Builds(settings, self._store, present)
        try:
            builds.trace(params, present.batch, rng, model_state)
        except KeyError as error:
            micro = micro_batch_shapes(present.batch, settings.microbatches)
            rest = (model_state, micro, rng) if settings.has_state else (micro, rng)
            path = _missing(loss_fn, params, *rest) or error.args[0]
            raise ValueError(
                f"the new loss reads parameter '{path}', which params lack: give a value for every parameter that it "
                "reads (of those that are kept the value does not matter)"
            ) from error
        return builds

    @staticmethod
    def _key(present: Builds, loss_fn: Loss, params: Tree, model_state: Tree) -> Hashable:
        return id(loss_fn), *map(batch_shapes, (params, present.batch, model_state))


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
        found = _Watched({key: watched(value, (*path, key)) for key, value in tree.items()})
        found.path = path
        return found

    try:
        jax.eval_shape(lambda params, *rest: loss_fn(watched(params, ()), *rest), params, *rest)
    except _MissingError as missing:
        return str(missing)
    except Exception:
        return None
    return None
