"""The states of a session on disk: saved by parameter path, restored under the plan of whoever restores."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jvpipe.ir.values import ValueKind
from jvpipe.runtime.checkpoints.checkpoint import load_checkpoint
from jvpipe.runtime.checkpoints.flight import restore_in_flight
from jvpipe.runtime.checkpoints.saving import Saving, saved_inputs, saved_words
from jvpipe.runtime.state import State
from jvpipe.runtime.versions import VersionLedger
from jvpipe.session.session import Session


def save(session: Session, path: str | Path, state: State, extra: dict[str, Any]) -> None:
    """Writes a checkpoint of a state; of several processes all call it, and the first one writes.

    Args:
        session: what the state belongs to.
        path: a folder.
        state: at rest, or in flight.
        extra: kept with it; what JSON can hold.

    Raises:
        ValueError: the state is in flight over several processes.
    """
    saving, trees, hosts = _saving(session), session.trees, session.settings.hosts
    if hosts is not None and state.stream_steps:
        raise ValueError("over several processes a state in flight cannot be saved: save what pipe.drain returns")
    values = {kind: session.host_values(state, ValueKind(kind)) for kind in saving.names}
    arrays = {kind: leaves for kind, leaves in values.items() if leaves is not None}
    shapes = {"params": trees.params, "batch": trees.batch, "model_state": trees.model_state}

    def write() -> None:
        saving.write(path, state, arrays, trees.rng, shapes, session.ledger.versions, extra)

    if hosts is None:
        write()
    else:
        hosts.first("checkpoint", write)


def restore(session: Session, path: str | Path) -> State:
    """Begins a run with the state that `save` wrote, under the plan in use.

    Args:
        session: of the same model; one that has none yet takes that of the checkpoint.
        path: a folder.

    Raises:
        ValueError: the checkpoint is of another model, or of other cuts if it was saved in flight.
        DamageError: it is not as it was saved.
        MemoryLimitExceeded: the run does not keep the limits.
    """
    hosts = session.settings.hosts
    arrays, meta = hosts.together("checkpoint", lambda: load_checkpoint(path)) if hosts else load_checkpoint(path)
    if not session.compiled_plans:
        session.compiled_plans.trace(*saved_inputs(path, meta))
    compiled, words, step = session.compiled, saved_words(meta), int(meta["step"])
    if compiled.previous:  # it was on its way from another plan
        compiled = replace(compiled, previous=None)
    saving = _saving(session)
    if "flight" not in meta:
        leaves, updates = saving.leaves(path, arrays), int(meta.get("updates", 0))
        state = session.place(session.compiled_plans, compiled, leaves, words, step, updates)
    else:
        in_flight = meta["flight"]
        stream_steps = int(in_flight["steps"])
        saving.check_in_flight(path, in_flight)
        if len(in_flight["legs"]) > 1:
            compiled = session.compiled_plans.from_spans(in_flight["legs"])
        session.reset(compiled, compiled.peaks)
        restored = restore_in_flight(compiled, stream_steps, arrays["flight"], session.ledger)
        session.ledger.versions = VersionLedger.from_json(in_flight["versions"])
        state = State(restored, words, step, stream_steps, int(meta["updates"]), session.compiled_plans.model_id)
    if compiled is not session.compiled:
        session.compiled_plans.adopt(compiled)
    return state


def _saving(session: Session) -> Saving:
    return Saving(session.compiled, session.settings.schedule, session.settings.microbatches)
