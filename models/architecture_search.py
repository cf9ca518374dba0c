"""An architecture search in one pipeline, which trains each architecture for a few steps."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from jvpipe.models.architecture import Architecture, Supernet
from jvpipe.models.evolution import RegularizedEvolution
from jvpipe.pipeline import Pipeline
from jvpipe.runtime.engine.beside_training import beside_training
from jvpipe.runtime.engine.training_state import State
from jvpipe.session.session import Metrics

Tree = Any


@dataclass(frozen=True)
class Candidate:
    """An architecture, with its loss function and its initial parameters, which are on the host."""

    architecture: Architecture
    loss_fn: Callable[..., Any]
    params: Tree


class ArchitectureSearch:
    """A search by regularized evolution. Blocks of the same name share their parameters.

    The evolution compares architectures by their mean losses over their steps. When one
    architecture begins to train, the next one is drawn, and a thread compiles it. For this draw,
    the evolution uses the losses of all earlier architectures, but no loss of the one in training.
    So the sequence depends only on the seed and the losses, not on the speed of the thread.

    Args:
        supernet: the space of architectures, with their losses and parameters.
        seed: the seed of the sequence and of the parameters.
        steps: the number of steps for which an architecture is trained before the next one follows.
        evolution: draws the architectures, given the losses of earlier ones; None for an evolution
            with `seed`.
    """

    def __init__(
        self,
        supernet: Supernet,
        seed: int,
        steps: int = 5,
        evolution: RegularizedEvolution | None = None,
    ) -> None:
        self.steps, self._supernet = steps, supernet
        self.evolution = evolution or RegularizedEvolution(supernet.space, seed)
        self._key = jax.random.key(seed)
        # A pipeline recognizes a model by the identity of its loss function, so an
        # architecture that is drawn again must get the same function object.
        self._loss_of = cache(supernet.loss_of)
        self.first = self._candidate(next(self.evolution))

    def run(
        self, pipe: Pipeline, state: State, batches: Iterable[Tree], num_steps: int
    ) -> Iterator[tuple[State, Metrics, Architecture]]:
        """Trains one architecture after another, and yields the result of each step.

        Args:
            pipe: the pipeline that trains the architectures.
            state: the state that `Pipeline.init` made for the architecture `first`.
            batches: the batches for all steps.
            num_steps: the number of steps of all architectures together.

        Yields:
            The new state, the metrics of the step, and the architecture that was trained.
        """
        batches, candidate = iter(batches), self.first
        background = ThreadPoolExecutor(1)
        try:
            for done in range(0, num_steps, self.steps):
                count, ahead, losses = min(self.steps, num_steps - done), None, []
                if done + count < num_steps:
                    ahead = background.submit(self._prepared, pipe, next(self.evolution))
                for state, metrics in pipe.run(state, batches, count):  # noqa: B020 - the newest state is passed on
                    losses.append(metrics["loss"])
                    # The loss is reported before the yield, because the caller may stop after the
                    # last step.
                    if len(losses) == count:
                        self.evolution.report(candidate.architecture, float(np.mean(losses)))
                    yield state, metrics, candidate.architecture
                if ahead is not None:
                    candidate = ahead.result()
                    state = pipe.update_model(state, candidate.loss_fn, candidate.params)
        finally:
            # A caller that stops early does not wait for an architecture that it will not train.
            background.shutdown(wait=False, cancel_futures=True)

    def _prepared(self, pipe: Pipeline, architecture: Architecture) -> Candidate:
        with beside_training():
            candidate = self._candidate(architecture)
            pipe.precompile(candidate.loss_fn, candidate.params)
            return candidate

    def _candidate(self, architecture: Architecture) -> Candidate:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            params = jax.tree.map(np.asarray, self._supernet.params_of(architecture, self._key))
        return Candidate(architecture, self._loss_of(architecture), params)
