"""The built-in models at their real sizes, as planners are asked about them."""

import jax

from jvpipe import models
from jvpipe.schedules import find_schedule
from jvpipe.session.question import Question


def question(model: str, size: str | None, batch_size: int, microbatches: int, stages: int = 4) -> Question:
    """A model of a size over some stages, whole batch and micro-batches given."""
    workload = models.load(model, size)
    return Question(
        workload.loss_fn,
        jax.eval_shape(workload.init, jax.random.key(0)),
        workload.abstract_batch(batch_size),
        workload.optimizer(workload.steps),
        stages,
        microbatches,
        find_schedule("1f1b"),
        workload.initial_state(),
        workload.has_aux,
        workload.has_state,
    )
