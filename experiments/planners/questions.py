"""The built-in models at their real sizes, as planners are asked about them."""

import jax
import optax

from jvpipe import models
from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import Cluster
from jvpipe.models.workload import Workload
from jvpipe.schedules import find_schedule
from jvpipe.session.question import Question


def question(
    model: str, size: str | None, batch_size: int, microbatches: int, stages: int = 4
) -> Question:
    """A model of a size over some stages, whole batch and micro-batches given."""
    workload = models.load(model, size)
    return question_of(
        workload, batch_size, microbatches, stages, workload.optimizer(workload.steps)
    )


def question_of(
    workload: Workload,
    batch_size: int,
    microbatches: int,
    stages: int,
    optimizer: optax.GradientTransformation,
    schedule: str = "1f1b",
) -> Question:
    """A workload over some stages.

    Args:
        workload: the model and its shapes.
        batch_size: examples of a step.
        microbatches: of a step.
        stages: devices that pass a micro-batch on.
        optimizer: of its parameters.
        schedule: by its name.
    """
    return Question(
        loss_fn=workload.loss_fn,
        params=jax.eval_shape(workload.init, jax.random.key(0)),
        batch=workload.abstract_batch(batch_size),
        optimizer=optimizer,
        stages=stages,
        microbatches=microbatches,
        schedule=find_schedule(schedule),
        model_state=workload.initial_state(),
        has_aux=workload.has_aux,
        has_state=workload.has_state,
    )


def costs_on(asked: Question, cluster: Cluster) -> Costs:
    """Estimates the costs of the model of a question on the first device of a cluster."""
    model = asked.trace()
    return asked.costs(cluster, model.traced, asked.cut(model))
