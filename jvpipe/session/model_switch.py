"""Another model in the place of the one that is trained, from the next step on."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jvpipe.runtime.engine.failures import HostLost, StageError
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.session.session import Session
from jvpipe.session.settings import agreed_rows

Tree = Any
_log = logging.getLogger("jvpipe")


def switch_model(
    session: Session, state: State, loss_fn: Callable[..., Any], params: Tree, model_state: Tree
) -> State:
    """Goes on with another model; what is in flight is finished first.

    Args:
        session: what trains the present model.
        state: the newest; consumed.
        loss_fn: of the same kind as the present one.
        params: those of the new model; of what is kept or comes back shapes are enough.
        model_state: arrays or shapes; by default the present one.

    Raises:
        ValueError: the loss reads a parameter that `params` lack, or one has another shape than before.
        MemoryLimitExceeded: the new model does not keep the limit. In both cases nothing has changed.
        StageError: something failed on the way; its `state` is the present model's, drained and whole.
    """
    session.check_state(state)
    known, present = session.known_models, session.compiled_plans
    compiled_plans = known.compiled_for(present, loss_fn, params, model_state)
    switch = known.plan_switch(present, compiled_plans, params, model_state, session.limits)
    if (hosts := session.settings.hosts) is not None:  # nothing crosses before all are ready
        hosts.agree("the rows of new models", agreed_rows(compiled_plans.current))
    session.check_losses(state, wait=bool(state.stream_steps))  # while their versions are known
    state = session.drain(state)
    state.check(len(session.compiled.persistent))
    try:
        state = replace(state, arrays=switch.run(state.arrays, session.ledger))
    except HostLost:
        raise
    except StageError as error:
        error.state = replace(state, arrays=tuple(error.table))
        error.add_note(
            "The model before is whole: go on with the `state` of this error, or save it."
        )
        raise
    session.follow(compiled_plans)
    session.ledger.versions = VersionLedger()
    session.model_history.append(switch.change(state.step))
    _log.info("%s", session.model_history[-1])
    return replace(state, model=compiled_plans.model_id)
