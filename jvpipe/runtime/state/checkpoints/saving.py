"""Translates states to the contents of checkpoints, and back.

A micro-batch is in flight if its forward has run and its backward has not. A state at rest has no
micro-batch in flight. Its arrays are saved under their paths in the parameters, the optimizer's
state and the model state. So it fits any cuts. A state in flight also has arrays that exist only
under its schedule and plan, such as residuals (what a forward leaves for its backward). Its arrays
are also saved under the names of their buffers. So they fit only the same schedule and plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jvpipe.ir.layers import Array
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
from jvpipe.trace.loss import KeyKind
from jvpipe.util.devices import is_own


@dataclass(frozen=True)
class Saving:
    """The translation between the states of a compiled plan and the contents of a checkpoint.

    Args:
        compiled: the compiled plan of the states.
    """

    compiled: CompiledPlan

    @property
    def _by_kind(self) -> dict[str, list[Array]]:
        """The arrays of each kind in a checkpoint."""
        graph = self.compiled.traced.graph
        return {
            "parameter": [p.array for p in graph.parameters],
            "optimizer": [leaf.array for leaf in self.compiled.optimizer.state],
            "state": list(graph.state),
        }

    def arrays(self, of_state: Sequence[jax.Array | None], stream_steps: int) -> Arrays:
        """Returns copies on the host of the arrays that this process has to save.

        If an array lies at several places, the process with the first copy saves it.

        Args:
            of_state: the arrays of the state; None for those that another process holds.
            stream_steps: how many steps the stream has had; 0 at rest.
        """
        newest = newest_of(self.compiled, stream_steps)
        arrays: Arrays = {}
        for kind, of_kind in self._by_kind.items():
            arrays[kind] = {}
            for i, array in enumerate(of_kind):
                x = of_state[newest[kind, i]]
                if x is not None:
                    arrays[kind][array.name] = to_host(x)
        # A state in flight is saved with all of its arrays, besides the newest versions above.
        if stream_steps:
            spots = names_of(self.compiled, stream_steps)
            pairs = zip(spots, of_state, strict=True)
            arrays["flight"] = {str(spot): to_host(x) for spot, x in pairs if x is not None}
        return arrays

    def own(self, stream_steps: int) -> set[tuple[str, str]]:
        """Returns the kinds and names of a checkpoint's arrays that this process has to read.

        Args:
            stream_steps: how many steps the saved stream has had; 0 at rest.
        """
        # In flight, each buffer has an array of its own under the kind flight. At rest, an array
        # that lies at several places is saved once. Constants are not saved: the trace has them.
        devices = self.compiled.devices
        spots = names_of(self.compiled, stream_steps)
        here = [spot for spot in spots if is_own(devices[spot.place])]
        if stream_steps:
            return {("flight", str(spot)) for spot in here}
        by_kind = self._by_kind
        leaves = {(str(spot.value.kind), spot.value.index) for spot in here}
        return {(kind, by_kind[kind][i].name) for kind, i in leaves if kind in by_kind}

    def meta(
        self,
        state: State,
        rng: jax.Array | None,
        shapes: Mapping[str, Any],
        versions: VersionLedger,
        extra: dict[str, Any],
    ) -> dict[str, Any]:
        """Returns the entries of a checkpoint's `meta.json` for a state.

        Args:
            state: a state at rest or in flight.
            rng: the key of the run.
            shapes: the shapes of the trees with which the model was traced.
            versions: the ledger of the run; its newest uses are saved with a state in flight.
            extra: the caller's values, which JSON can hold.
        """
        key = None if rng is None else KeyKind.of(rng)
        meta = {
            "step": state.step,
            "updates": state.updates,
            "words": None if state.words is None else state.words.tolist(),
            "key": None if key is None else [list(key.shape), key.impl],
            "schedule": self.compiled.schedule.name,
            "shapes": {name: skeleton.dump(tree) for name, tree in shapes.items()},
            "extra": extra,
        }
        if state.stream_steps:
            legs = []
            for span in self.compiled.spans:
                legs.append([span.start, span.layout.plan.to_json()])
            meta["flight"] = {
                "steps": state.stream_steps,
                "bound_to": self._binding,
                "legs": legs,
                "versions": versions.to_json(),
            }
        return meta

    def leaves(self, path: str | Path, arrays: Arrays) -> dict[Name, Leaf]:
        """Returns a leaf, which puts an array on a device, for each saved array that was read.

        Args:
            path: the path of the checkpoint, for the message.
            arrays: the arrays by kind and path; None for those that another process reads.

        Raises:
            ValueError: the arrays are of another model.
        """
        leaves: dict[Name, Leaf] = {}
        for kind, of_kind in self._by_kind.items():
            saved = arrays.get(kind, {})
            shapes = {array.name: (tuple(array.shape), str(array.dtype)) for array in of_kind}
            check_paths(kind, saved, shapes, str(path))
            for i, array in enumerate(of_kind):
                if saved[array.name] is not None:
                    (leaves[kind, i],) = given_leaves([saved[array.name]])
        return leaves

    def check_in_flight(self, path: str | Path, in_flight: Mapping[str, Any]) -> None:
        """Checks that micro-batches saved in flight can go on under this plan.

        Args:
            path: the path of the checkpoint, for the message.
            in_flight: the entry of `meta.json` about the micro-batches in flight.

        Raises:
            ValueError: the micro-batches ran under another schedule, cuts, fates or devices, or a
                step had another number of micro-batches.
        """
        plan = Plan.from_json(in_flight["legs"][-1][1])
        then = [stage.devices for stage in plan.stages]
        now = [stage.devices for stage in self.compiled.plan.stages]
        if in_flight["bound_to"] != self._binding or then != now:
            saved, cuts, _, _, micro, *_ = in_flight["bound_to"]
            raise ValueError(
                f"{path} was saved in flight under {saved['name']} with cuts {cuts} on "
                f"devices {then} and {micro} micro-batches: "
                "only the same schedule, cuts, devices, fates and micro-batches can go on. "
                "Use these (its plan is jvpipe.checkpoint_plan(path)), "
                "or save a state that pipe.drain returned"
            )

    @property
    def _binding(self) -> list[Any]:
        """The parts of schedule and plan, as JSON, that a state in flight needs unchanged.

        Checkpoints contain this list, so its order is part of their format.
        """
        plan = self.compiled.plan
        fates = [dict(stage.fates) for stage in plan.stages]
        binding = [
            self.compiled.schedule.options,
            list(plan.cuts),
            list(plan.splits),
            fates,
            self.compiled.microbatches,
        ]
        # These entries are newer than the others. A plan that does not need an entry does not get
        # it, so that the plan matches its older checkpoints.
        if plan.replicated:
            binding.append(list(plan.replicas))
        states = [dict(stage.state_fates) for stage in plan.stages]
        if any(states):
            binding.append(states)
        return binding


def checkpoint_plan(path: str | Path) -> Plan | None:
    """Returns the plan that a state saved in flight needs, for `Pipeline(stages=plan)`.

    Returns None for a state at rest, which any plan can use.
    """
    saved = open_checkpoint(path)
    saved.check_state()
    in_flight = saved.meta.get("flight")
    return Plan.from_json(in_flight["legs"][-1][1]) if in_flight else None


def saved_words(meta: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the words of a saved run's random key: its integers."""
    return None if meta["words"] is None else np.asarray(meta["words"], np.uint32)


def saved_inputs(
    path: str | Path, meta: Mapping[str, Any]
) -> tuple[Any, Any, jax.Array | None, Any]:
    """Returns the saved shapes of parameters and batch, the key, and the shapes of the model state.

    Args:
        path: the path of the checkpoint, for the message.
        meta: the content of its `meta.json`.

    Raises:
        ValueError: the checkpoint lacks the containers of a tree, or they cannot be made here.
    """
    shapes = meta["shapes"]
    unknown = [name for name, shape in shapes.items() if shape is None]
    if unknown:
        raise ValueError(
            f"{path} does not tell the containers of its {' and '.join(unknown)}: "
            "call init before restore"
        )
    try:
        trees = {name: skeleton.load_container(shape) for name, shape in shapes.items()}
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}, or call init") from problem
    rng = None if meta["key"] is None else _saved_key(path, meta)
    return trees["params"], trees["batch"], rng, trees["model_state"]


def _saved_key(path: str | Path, meta: Mapping[str, Any]) -> jax.Array:
    """Returns the key of a saved run; raises DamageError if its words do not make one."""
    shape, impl = meta["key"]
    words = np.asarray(meta["words"], np.uint32)
    key = jax.numpy.asarray(words.reshape(shape))
    if impl is None:  # a key of `PRNGKey`, which is an array of words
        return key
    try:
        return jax.random.wrap_key_data(key, impl=impl)
    except TypeError as problem:
        damage = f"{len(words)} words of shape {shape} are not a key of {impl}"
        raise DamageError(f"{path} is damaged: meta.json: {damage}") from problem
