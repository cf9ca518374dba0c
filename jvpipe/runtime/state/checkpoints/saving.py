"""States as checkpoints: a plain one for any cut, one in flight for the same schedule, cuts and fates alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jvpipe._jax import is_own
from jvpipe.ir.plan import Plan
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.training_state import Leaf, Name, State, given_leaves
from jvpipe.runtime.engine.transport import to_host
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.runtime.state.checkpoints import skeleton
from jvpipe.runtime.state.checkpoints.array_file import Arrays
from jvpipe.runtime.state.checkpoints.checkpoint import check_paths, open_checkpoint
from jvpipe.runtime.state.checkpoints.flight import names_of, newest_of
from jvpipe.runtime.state.checkpoints.generations import DamageError
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.loss import KeyKind


@dataclass(frozen=True)
class Saving:
    """Says what the states of a compiled plan are in a checkpoint, and checks what is in one."""

    compiled: CompiledPlan
    schedule: Schedule
    microbatches: int

    @property
    def names(self) -> dict[str, list[str]]:
        """The names of the arrays of each kind in a checkpoint."""
        graph = self.compiled.traced.graph
        return {
            "parameter": [p.array.name for p in graph.parameters],
            "optimizer": [leaf.array.name for leaf in self.compiled.optimizer.state],
            "state": [array.name for array in graph.state],
        }

    def arrays(self, held: Sequence[jax.Array | None], stream_steps: int) -> Arrays:
        """The arrays of a state on the host; of several processes each has some: of copies the holder of the first.

        Args:
            held: those of a state, None for what another process holds.
            stream_steps: the steps of its stream, 0 at rest.
        """
        newest = newest_of(self.compiled, stream_steps)
        arrays: Arrays = {}
        for kind, names in self.names.items():
            named = ((name, held[newest[kind, i]]) for i, name in enumerate(names))
            arrays[kind] = {name: to_host(x) for name, x in named if x is not None}
        if stream_steps:
            spots = zip(names_of(self.compiled, stream_steps), held, strict=True)
            arrays["flight"] = {str(spot): to_host(x) for spot, x in spots if x is not None}
        return arrays

    def own(self, stream_steps: int) -> set[tuple[str, str]]:
        """The arrays of a checkpoint that this process has to hold, by kind and name.

        Args:
            stream_steps: the steps of the stream that was saved, 0 at rest.
        """
        compiled = self.compiled
        here = [
            spot
            for spot in names_of(compiled, stream_steps)
            if is_own(compiled.devices[spot.place])
        ]
        if stream_steps:
            return {("flight", str(spot)) for spot in here}
        indices = {(spot.value.kind, spot.value.index) for spot in here}
        return {
            (kind, name)
            for kind, names in self.names.items()
            for i, name in enumerate(names)
            if (kind, i) in indices
        }

    def meta(
        self,
        state: State,
        rng: jax.Array | None,
        shapes: Mapping[str, Any],
        versions: VersionLedger,
        extra: dict[str, Any],
    ) -> dict[str, Any]:
        """Tells of a state what its arrays do not.

        Args:
            state: at rest, or in flight.
            rng: the key of the run.
            shapes: the trees that the model was traced with.
            versions: the ledger of the run, of which a state in flight needs the end.
            extra: the caller's own; what JSON can hold.
        """
        meta = {
            "step": state.step,
            "updates": state.updates,
            "words": None if state.words is None else state.words.tolist(),
            "key": None if rng is None else [list(KeyKind.of(rng).shape), KeyKind.of(rng).impl],
            "schedule": self.schedule.name,
            "shapes": {name: skeleton.dump(tree) for name, tree in shapes.items()},
            "extra": extra,
        }
        if state.stream_steps:
            meta["flight"] = {
                "steps": state.stream_steps,
                "bound_to": self._binding,
                "legs": [[span.start, span.layout.plan.to_json()] for span in self.compiled.spans],
                "versions": versions.to_json(),
            }
        return meta

    def leaves(self, path: str | Path, arrays: Arrays) -> dict[Name, Leaf]:
        """The saved arrays by name, those that were read.

        Raises:
            ValueError: they are of another model.
        """
        leaves: dict[Name, Leaf] = {}
        for kind, names in self.names.items():
            named = arrays.get(kind, {})
            check_paths(
                kind, named, dict(zip(names, self._shapes_of(kind), strict=True)), str(path)
            )
            leaves |= {
                (kind, i): given_leaves([named[name]])[0]
                for i, name in enumerate(names)
                if named[name] is not None
            }
        return leaves

    def check_in_flight(self, path: str | Path, in_flight: Mapping[str, Any]) -> None:
        """Raises ValueError if what was in flight belongs to another schedule, other cuts, fates or devices."""
        plan = Plan.from_json(in_flight["legs"][-1][1])
        then, now = (
            [stage.devices for stage in stages]
            for stages in (plan.stages, self.compiled.plan.stages)
        )
        if in_flight["bound_to"] != self._binding or then != now:
            saved, cuts, _, _, micro, *_ = in_flight["bound_to"]
            raise ValueError(
                f"{path} was saved in flight under {saved['name']} with cuts {cuts} on devices {then} and {micro} "
                "micro-batches: only the same schedule, cuts, devices, fates and micro-batches can go on. Use these "
                "(its plan is jvpipe.checkpoint_plan(path)), or save a state that pipe.drain returned"
            )

    @property
    def _binding(self) -> list[Any]:
        plan = self.compiled.plan
        fates = [dict(stage.fates) for stage in plan.stages]
        states = [dict(stage.state_fates) for stage in plan.stages]
        turns = [list(plan.replicas)] if plan.replicated else []
        return [
            self.schedule.options,
            list(plan.cuts),
            list(plan.splits),
            fates,
            self.microbatches,
            *turns,
            *([states] if any(states) else []),
        ]

    def _shapes_of(self, kind: str) -> list[tuple[tuple[int, ...], str]]:
        graph, optimizer = self.compiled.traced.graph, self.compiled.optimizer
        arrays = {
            "parameter": [p.array for p in graph.parameters],
            "optimizer": [leaf.array for leaf in optimizer.state],
            "state": graph.state,
        }
        return [(tuple(a.shape), str(a.dtype)) for a in arrays[kind]]


def checkpoint_plan(path: str | Path) -> Plan | None:
    """The plan that a state saved in flight goes on under, as `Pipeline(stages=plan)`; None if any will do."""
    saved = open_checkpoint(path)
    saved.check_state()
    in_flight = saved.meta.get("flight")
    return Plan.from_json(in_flight["legs"][-1][1]) if in_flight else None


def saved_words(meta: Mapping[str, Any]) -> np.ndarray | None:
    """The words of a saved run's key."""
    return None if meta["words"] is None else np.asarray(meta["words"], np.uint32)


def saved_inputs(
    path: str | Path, meta: Mapping[str, Any]
) -> tuple[Any, Any, jax.Array | None, Any]:
    """The shapes of parameters and batch, the key and the shapes of the model state that a checkpoint tells of.

    Raises:
        ValueError: it does not know the containers of one of them.
    """
    shapes = meta["shapes"]
    if unknown := [name for name, shape in shapes.items() if shape is None]:
        raise ValueError(
            f"{path} does not tell the containers of its {' and '.join(unknown)}: call init before restore"
        )
    try:
        trees = {name: skeleton.load(shape) for name, shape in shapes.items()}
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}, or call init") from problem
    rng = None
    if meta["key"] is not None:
        (shape, impl), words = meta["key"], np.asarray(meta["words"], np.uint32)
        rng = jax.numpy.asarray(words.reshape(shape))
        try:
            rng = rng if impl is None else jax.random.wrap_key_data(rng, impl=impl)
        except TypeError as problem:
            told = f"{len(words)} words of shape {shape} are no key of {impl}"
            raise DamageError(f"{path} is damaged: meta.json: {told}") from problem
    return trees["params"], trees["batch"], rng, trees["model_state"]
