"""Another model in the place of the one that is trained, from the next step on."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jvpipe.runtime.engine.failures import HostLost, StageError
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.engine.versions import VersionLedger
from jvpipe.runtime.state.model_change import plan_model_switch
from jvpipe.session.session import Session
from jvpipe.session.settings import agree_on_rows
from jvpipe.session.trees import with_sums

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
        model_state: of the new model; by default the present one.

    Raises:
        ValueError: the loss reads a parameter that `params` lack, or one has another shape than before.
        MemoryLimitExceeded: the new model does not keep the limit. In both cases nothing has changed.
        StageError: something failed on the way; its `state` is the present model's, drained and whole.
    """
    session.check_state(state)
    models, present = session.known_models, session.compiled_plans
    compiled_plans = models.compiled_for(present, loss_fn, params, model_state)
    old, new = present.current, compiled_plans.current
    trees = compiled_plans.trees
    states = jax.tree.leaves(trees.model_state if model_state is None else model_state)
    values = {
        "parameter": jax.tree.leaves(trees.stacks.split(params)),
        "state": with_sums(states, new.traced.graph.state),
    }
    switch = plan_model_switch(old, new, values, models.parked, session.limits)
    agree_on_rows(new, "the rows of new models")
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
