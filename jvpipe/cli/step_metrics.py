"""The numbers of a step that was run, as metrics.jsonl has them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jvpipe.cli.job import Job
from jvpipe.cost.utilisation import ideal_s
from jvpipe.report import timeline
from jvpipe.report.metrics import StepMetrics
from jvpipe.runtime.monitor import Measured
from jvpipe.trace.graph import Traced
from jvpipe.trace.leaves import path_name, path_names

Done = tuple[int, dict[str, Any], Sequence[str]]
"""A step that was dispatched: its number, its metrics, and the names of the architecture's blocks."""
_TOKENS = ("tokens", "input_ids", "inputs")
"""The names under which batches have the tokens that a model reads."""


class StepNumbers:
    """Reads what the steps of a job yield, in the process that it is in."""

    def __init__(self, job: Job) -> None:
        self._job, self._tokens = job, tokens_in(job.data.example)
        self._ideal: tuple[Traced | None, float | None] = None, None

    def of(self, done: Done, measured: Measured, seconds: float) -> StepMetrics:
        """The metrics of a step; waits for its end.

        Args:
            done: the step.
            measured: what ran when in it.
            seconds: that it took.
        """
        job, (step, metrics, architecture) = self._job, done
        ideal = self._ideal_s()
        planned = job.pipe.session.planned
        return StepMetrics(
            step=step,
            loss=float(metrics["loss"]),
            learning_rate=float(
                job.learning_rates[step * len(job.learning_rates) // job.steps - 1]
            ),
            grad_norm=float(metrics.get("grad_norm", math.nan)),
            seconds=seconds,
            examples_per_s=job.batch_size / seconds,
            bubble_fraction=timeline.bubble_fraction(measured.spans),
            busy_fraction=timeline.busy_fractions(measured.spans),
            peak_bytes={str(device): peak for device, peak in job.pipe.ledger.peak_bytes.items()},
            staleness=job.pipe.ledger.versions.staleness(sum(job.pipe.plan.cuts)),
            swapped_bytes=measured.swapped_bytes,
            copy_hidden_s=measured.hidden_s,
            copy_exposed_s=measured.exposed_s,
            recomputed_s=measured.recomputed_s + (planned.recompute_s if planned else 0.0),
            tokens_per_s=None if self._tokens is None else self._tokens / seconds,
            mfu=None if ideal is None else ideal / seconds,
            aux=scalars_in(metrics.get("aux", ())),
            architecture=tuple(architecture),
        )

    def _ideal_s(self) -> float | None:
        """The least seconds of a step, of the model that there is now."""
        pipe = self._job.pipe
        traced = pipe.session.compiled.traced
        if traced is not self._ideal[0]:
            settings = pipe.session.settings
            kinds = [device.device_kind for device in set(settings.devices)]
            self._ideal = traced, ideal_s(traced, settings.microbatches, kinds)
        return self._ideal[1]


def tokens_in(batch: Any) -> int | None:
    """How many tokens a batch has that the model reads: in leaves of integers called tokens, input_ids or inputs.

    Their first two axes are counted, examples and positions, padding included. None where there is no such leaf.

    >>> tokens_in({"inputs": np.zeros((2, 8), int), "tokens": np.zeros((2, 4), int), "weights": np.ones((2, 4))})
    24
    >>> tokens_in(np.zeros((2, 8), int))
    """
    counts = [
        math.prod(leaf.shape[:2])
        for path, leaf in jax.tree.leaves_with_path(batch)
        if path_name(path[-1:]) in _TOKENS
        and len(leaf.shape) >= 2
        and np.issubdtype(leaf.dtype, np.integer)
    ]
    return sum(counts) if counts else None


def scalars_in(aux: Any) -> Mapping[str, float]:
    """The single numbers of a tree by their path; one that is the whole tree is called aux.

    >>> scalars_in({"accuracy": np.float32(0.5), "logits": np.zeros(3)})
    {'accuracy': 0.5}
    """
    leaves = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(aux) if np.shape(leaf) == ()]
    names = path_names([path for path, _ in leaves])
    return {name or "aux": float(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}
