"""Checkpoints of a session's states; the names of arrays are the paths of their parameters.

A micro-batch is in flight if its forward has run and its backward has not. A state at rest has no
micro-batch in flight and can be restored under any cuts. A state in flight has some; its arrays
return to the devices from which they were saved, so the cuts must be the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.disagreement import Disagreement
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.row_agreement import agree_on_rows
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.runtime.state.checkpoints import skeleton
from jvpipe.runtime.state.checkpoints.array_file import Arrays
from jvpipe.runtime.state.checkpoints.checkpoint import Saved, save_checkpoint
from jvpipe.runtime.state.checkpoints.flight import restore_in_flight
from jvpipe.runtime.state.checkpoints.process_parts import open_together, read_together, save_parts
from jvpipe.runtime.state.checkpoints.saving import Saving, saved_inputs, saved_words
from jvpipe.session.engine import Engine
from jvpipe.trace.batches import shapes_of, shown
from jvpipe.trace.loss import KeyKind
from jvpipe.util.brief import brief, first_line
from jvpipe.util.pattern import anything, compare

Meta = dict[str, Any]
"""The entries of a checkpoint's `meta.json`."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state on the host, which later steps do not change.

    If there are several processes, the snapshot of each has the arrays that this process holds.
    """

    arrays: Arrays
    meta: Meta
    hosts: Hosts | None

    def write(self, path: str | Path) -> None:
        """Writes the snapshot as a checkpoint; any thread may call this.

        In a run of several processes, all must write the same snapshots in the same order.

        Args:
            path: the folder of the checkpoint.
        """
        if self.hosts is None:
            save_checkpoint(path, self.arrays, self.meta)
        else:
            save_parts(self.hosts, path, self.arrays, self.meta)


def snapshot(session: Engine, state: State, extra: dict[str, Any]) -> Snapshot:
    """Copies a state to the host for later writing; all processes of the run must call this.

    Args:
        session: the session to which the state belongs.
        state: a state at rest or in flight.
        extra: values for the user's own use, such as the epoch, in types that JSON can hold.
    """
    check_json(extra)
    saving = Saving(session.compiled)
    trees, hosts = session.trees, session.settings.hosts
    session.check_whole(session.compiled, state)

    def arrays() -> Arrays:
        try:
            if hosts is not None:
                hosts.come(*state.arrays)
            return saving.arrays(state.arrays, state.stream_steps)
        except Exception as error:
            raise session.controller.failure(error) from error

    # If a user calls `restore` before `init`, the loss is traced with these shapes.
    shapes = {"params": trees.params, "batch": trees.batch, "model_state": trees.model_state}
    meta = saving.meta(state, trees.rng, shapes, session.ledger.versions, extra)
    if hosts is None:
        return Snapshot(arrays(), meta, None)
    return Snapshot(hosts.together("state", arrays), meta, hosts.aside("checkpoints"))


def check_json(extra: Any) -> None:
    """Raises ValueError for a value that JSON cannot hold, or that JSON would change.

    >>> check_json({"seen": {1, 2}})
    Traceback (most recent call last):
    ValueError: extra must map names to values that JSON can hold, such as {'epoch': 3}: Object of
    type set is not JSON serializable
    """
    usual = "extra must map names to values that JSON can hold, such as {'epoch': 3}"
    names = extra if isinstance(extra, Mapping) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{usual}, not {brief(extra)}")
    try:
        compare("it", json.loads(json.dumps(extra)), {str: anything})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{usual}: {error}") from error


def restore(session: Engine, path: str | Path) -> State:
    """Begins a run with the state in a checkpoint, under the plan in use.

    Each process reads the arrays that it will hold.

    Args:
        session: a session of the same model. If `init` has not been called, the loss is traced with
            the shapes in the checkpoint.
        path: the folder of the checkpoint.

    Raises:
        ValueError: the checkpoint is of another model, or was saved in flight under other cuts.
        DamageError: a file of the checkpoint has changed or is missing.
        MemoryLimitExceeded: the run would exceed the limits.
    """
    saved = open_together(session.settings.hosts, path)
    saved.check_state()
    meta = saved.meta
    if not session.compiled_plans:
        _trace(session, path, meta)
    _check_key(session, path, meta)
    compiled = session.compiled
    if compiled.previous:  # the present stream ends here, so its earlier plans are dropped
        compiled = compiled.after(None)
    if "flight" in meta:
        in_flight = meta["flight"]
        Saving(compiled).check_in_flight(path, in_flight)
        _check_shapes(session, path, meta)
        if len(in_flight["legs"]) > 1:
            compiled = session.compiled_plans.from_spans(in_flight["legs"])
        state = _placed_in_flight(session, saved, compiled)
    else:
        state = _placed(session, path, saved, compiled)
    if compiled is not session.compiled:
        session.compiled_plans.adopt(compiled)
    return state


def _trace(session: Engine, path: str | Path, meta: Meta) -> None:
    """Traces the loss with a checkpoint's shapes; raises ValueError if the loss refuses them."""
    inputs = saved_inputs(path, meta)
    try:
        session.compiled_plans.trace(*inputs)
    except Disagreement:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        why = first_line(problem)
        raise ValueError(f"{path} describes a model that cannot begin here: {why}") from problem


def _check_key(session: Engine, path: str | Path, meta: Meta) -> None:
    """Raises ValueError unless the saved key has the same kind as the key of the trace."""
    rng, ours = session.trees.rng, None
    if rng is not None:
        kind = KeyKind.of(rng)
        ours = [list(kind.shape), kind.impl]
    if meta["key"] != ours:
        raise ValueError(
            f"{path} was saved with the key {meta['key']} (words, kind), this pipeline's "
            f"is {ours}: give init such a key"
        )


def _check_shapes(session: Engine, path: str | Path, meta: Meta) -> None:
    """Raises ValueError if batches saved in flight have other shapes than the first batch here."""
    saved, here = meta["shapes"]["batch"], session.trees.batch
    then = None if saved is None else skeleton.load_container(saved)
    if then is not None and shapes_of(then)[1] != shapes_of(here)[1]:
        raise ValueError(
            f"{path} was saved in flight with batches of {shown(then)}, those of this "
            f"pipeline are of {shown(here)}: restore it in a pipeline that began with such a "
            "batch, or in a new pipeline; or save the state that pipe.drain returns"
        )


def _placed(session: Engine, path: str | Path, saved: Saved, compiled: CompiledPlan) -> State:
    """Places the arrays of a state at rest."""
    saving, meta = Saving(compiled), saved.meta
    # Each process reads only the arrays that it will hold.
    names = saving.own(0)
    leaves = read_together(session.settings.hosts, lambda: saving.leaves(path, saved.read(names)))
    state = session.place(
        session.compiled_plans,
        compiled,
        leaves,
        saved_words(meta),
        meta["step"],
        meta["updates"],
    )
    # The new ledger lacks the steps before the checkpoint, so it is complete only at step 0.
    session.ledger.versions = VersionLedger(complete=state.step == 0)
    return state


def _placed_in_flight(session: Engine, saved: Saved, compiled: CompiledPlan) -> State:
    """Places the arrays of a state in flight, each on the device from which it was saved."""
    meta, in_flight = saved.meta, saved.meta["flight"]
    stream_steps = in_flight["steps"]
    names = Saving(compiled).own(stream_steps)
    arrays = read_together(session.settings.hosts, lambda: saved.read(names))
    # Arrays go straight to their devices, so placing them takes no more memory than a step.
    session.reset(compiled, compiled.peaks)
    try:
        placed = restore_in_flight(compiled, stream_steps, arrays["flight"], session.ledger)
    except ValueError as problem:
        raise ValueError(f"{saved.folder}: {problem}") from problem
    session.ledger.versions = VersionLedger.from_json(in_flight["versions"])
    agree_on_rows(compiled)
    return State(
        placed,
        saved_words(meta),
        meta["step"],
        stream_steps,
        meta["updates"],
        session.compiled_plans.model_id,
    )
