"""The class `Trainer`, the part of a pipeline that makes, trains, reads and saves states.

The pytrees that users give and get are flattened and rebuilt here and in the session. What runs
below the session uses only flat lists of arrays.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jvpipe.ir.values import ValueKind
from jvpipe.runtime.engine.given_agreement import agree_on_given
from jvpipe.runtime.engine.hosts import telling
from jvpipe.runtime.engine.training_state import Leaf, State, given_leaves, made_leaves
from jvpipe.session import checkpoints
from jvpipe.session.arguments import check_arrays, check_key, checked_stream
from jvpipe.session.engine import Metrics
from jvpipe.session.evaluation import evaluate, predict
from jvpipe.session.session import Session
from jvpipe.trace.leaves import is_initializer, made_shapes
from jvpipe.trace.stacks import Stacks
from jvpipe.util.given import check_callable, checked_path

Tree = Any


def _check_given(
    params: Tree, rng: jax.Array | None, model_state: Tree, *, has_state: bool
) -> None:
    """Raises ValueError for arguments of `init` that cannot be used, or if JAX compiles nothing.

    Args:
        params: the parameters, as the user gave them.
        rng: the key of the run.
        model_state: the model state, as the user gave it.
        has_state: whether the loss has a model state.
    """
    config: Any = jax.config  # its flags have no types
    if is_off := config.jax_disable_jit:
        raise ValueError(
            f"jax_disable_jit is {is_off}, but a pipeline runs compiled programs: set it to False "
            "(JAX_DISABLE_JIT=0), and to debug the loss, call it without a pipeline"
        )
    if rng is not None:
        check_key(rng)
    check_arrays(params, "parameter")
    check_arrays(model_state, "leaf of the model state")
    if model_state is not None and not has_state:
        raise ValueError(
            "model_state is given, but the loss has none: set has_state=True, or leave it out"
        )
    if is_initializer(params) and rng is None:
        raise ValueError(
            "parameters that a function makes need a key: call init(function, batch, rng)"
        )


class Trainer:
    """The part of a pipeline that makes states, trains them, reads them and saves them.

    Attributes:
        session: has the compiled plans, and runs the steps.
    """

    session: Session

    # A run

    @telling()
    def init(
        self, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree = None
    ) -> State:
        """Traces the loss, measures, plans, compiles, and places copies of the arrays on devices.

        Args:
            params: a pytree of arrays, in which each `jvpipe.LazyArray` is read only when
                it is placed; or a function `key -> params`. Each leaf of the function's
                result is computed on the device that will hold it.
            batch: a batch, or its shapes.
            rng: the key of the run.
            model_state: the model state, if the loss has one (`has_state`).
        """
        session, hosts = self.session, self.session.settings.hosts
        _check_given(params, rng, model_state, has_state=session.settings.has_state)
        if hosts is not None:
            agree_on_given(hosts, params, batch, rng, model_state)

        def put(stacks: Stacks) -> Sequence[Leaf]:
            return given_leaves(jax.tree.leaves(stacks.split(params)))

        def make(stacks: Stacks) -> Sequence[Leaf]:
            assert rng is not None
            return made_leaves(session.store, lambda key: stacks.split(params(key)), rng)

        if not is_initializer(params):
            return session.begin(params, batch, rng, model_state, put)
        assert rng is not None
        return session.begin(made_shapes(params, rng), batch, rng, model_state, make)

    def step(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        """Trains on one batch; consumes `state`, and does not wait for the devices.

        Under an asynchronous schedule, each call drains the pipeline; `run` keeps it full.

        Args:
            state: the newest state.
            batch: a batch; if its shapes are new, programs are compiled first.

        Raises:
            ValueError: the loss of an earlier step is not finite and a parameter is NaN;
                `state` is not consumed.
            MemoryLimitExceeded: a batch whose shapes differ from those of the batch of `init`
                exceeds the limit; the error has a `smallest_limit_bytes`, and `state` is not
                consumed.
            StageError: this step or the one before it failed; `restore` makes the pipeline
                usable again.
        """
        state, metrics = self.session.advance(state, batch)
        return self.session.drain(state), metrics

    def run(
        self,
        state: State,
        batches: Iterable[Tree],
        num_steps: int | None = None,
        on_step: Callable[[State, Metrics], Any] | None = None,
    ) -> Iterator[tuple[State, Metrics]]:
        """Yields the state and metrics of each step over a stream of batches.

        Each state is valid until the next step begins. Under an asynchronous schedule, the
        pipeline stays full between steps, and the states are in flight: they hold
        micro-batches whose backwards have not run. Such a state can be saved, evaluated or
        drained; its parameters are the newest of each layer. If the shapes of a batch differ
        from those of the batch of `init`, the micro-batches in flight are finished first, and
        the step ends with a flush.

        Args:
            state: the state to begin with, which is consumed.
            batches: an iterable of batches.
            num_steps: how many steps to run at most; by default one per batch.
            on_step: a function that is called with the state and the metrics of each step as
                soon as the step is dispatched; reading a metric there waits for the step.
        """
        if on_step is not None:
            check_callable("on_step", on_step, "state, metrics")
        for batch in checked_stream(batches, num_steps):
            state, metrics = self.session.advance(state, batch)
            if on_step is not None:
                on_step(state, metrics)
            yield state, metrics
        self.session.check_losses(state, wait=bool(state.stream_steps))

    def needs(self) -> list[str]:
        """Returns the names of the batch leaves that this process reads.

        In the batches of this process, all other leaves may be `jax.ShapeDtypeStruct`.
        """
        return self.session.needs()

    def drain(self, state: State) -> State:
        """Finishes the micro-batches in flight, and returns the state after them."""
        return self.session.drain(state)

    def wait(self, state: State) -> State:
        """Waits until a state has been computed; raises if a stage failed or a parameter is NaN."""
        return self.session.wait(state)

    def evaluate(self, state: State, batch: Tree, params: Tree | None = None) -> Metrics:
        """Computes a batch's metrics with forwards only, and leaves the state as it is.

        Args:
            state: its newest parameters and model state are used.
            batch: a batch whose size is a multiple of the number of micro-batches.
            params: parameters to use in place of the state's, such as averaged parameters
                from `optimizer_state`. The state's parameters stay in memory, too.

        Raises:
            ValueError: `params` are not like those of the pipeline.
            MemoryLimitExceeded: the evaluation exceeds the limit.
            StageError: the evaluation failed; the state is valid.
        """
        self.session.check_state(state)
        check_arrays(params, "parameter")
        leaves = () if params is None else self.session.trees.split_params(params)
        return evaluate(self.session, state, batch, leaves)

    def predict(self, state: State, batch: Tree, function: Callable[..., Any]) -> Tree:
        """Computes a function of parameters and a batch; each part runs where its parameters are.

        Args:
            state: its newest parameters and model state are read.
            batch: a batch of any size; its shapes may differ from those of the batch of `init`.
            function: a function of `(params, batch)`, or of `(params, model_state, batch)`
                with `has_state`, that returns a pytree of arrays, such as logits. It is
                compiled, unless the last prediction had the same function object, plan and
                batch shapes.

        Raises:
            ValueError: the function reads no parameter.
            MemoryLimitExceeded: the arrays of the state and of the function exceed the limit.
        """
        has_state = self.session.settings.has_state
        arguments = "params, model_state, batch" if has_state else "params, batch"
        check_callable("function", function, arguments)
        return predict(self.session, state, batch, function)

    # What a state holds

    def params(self, state: State) -> Tree:
        """Returns the parameters in the caller's tree, as numpy arrays.

        If there are several processes, all must call this; only the first gets the parameters.
        """
        leaves = self.session.host_values(state, ValueKind.PARAMETER)
        return None if leaves is None else self.session.trees.join_params(leaves)

    def model_state(self, state: State) -> Tree:
        """Returns the model state in the caller's tree, as numpy arrays; random keys stay keys.

        If there are several processes, all must call this; only the first gets the model state.
        """
        leaves = self.session.host_values(state, ValueKind.STATE)
        return None if leaves is None else self.session.trees.join_model_state(leaves)

    def optimizer_state(self, state: State) -> Tree:
        """Returns the optimizer's state in the tree of `optimizer.init(params)`, as numpy arrays.

        Random keys stay keys. The state of stacked layers is stacked. A leaf that depends only
        on the gradient of a frozen parameter is `optax.MaskedNode()`. Optimizer state
        may hold averaged parameters, which `evaluate(state, batch, params=...)` takes.
        For a state in flight, stages have made different numbers of updates. A leaf such as a step
        count then has the value of one stage.
        """
        leaves = self.session.host_values(state, ValueKind.OPTIMIZER)
        optimizer = self.session.compiled.optimizer
        if leaves is None:
            return None
        return self.session.trees.join_optimizer_state(optimizer, leaves)

    def with_optimizer_state(self, state: State, tree: Tree) -> State:
        """Returns the state with another optimizer state, for example with a new learning rate.

        Args:
            state: the newest state, which is consumed.
            tree: the tree that `optimizer_state` returns, with changes. If `state` is in flight,
                leaves that have not changed keep the value that they have on each stage.

        Raises:
            ValueError: the tree's leaves, shapes or types are not those of this optimizer's state.
        """
        check_arrays(tree, "leaf of the optimizer's state")
        leaves = self.session.trees.split_optimizer_state(self.session.compiled.optimizer, tree)
        return self.session.replace_optimizer_state(state, leaves)

    # Checkpoints

    def save(self, path: str | Path, state: State, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint, in which arrays are named by their paths in the trees.

        If there are several processes, each writes a part. A state with no micro-batches in
        flight can be restored under any cuts. A state in flight (see `run`) is saved with all
        its arrays, and can be restored only under the same schedule, cuts, devices and fates.
        Training then continues with bitwise identical results.

        Args:
            path: the folder of the checkpoint.
            state: any valid state.
            extra: values for your own use, such as the epoch, in types that JSON can hold;
                `jvpipe.checkpoint_extra` reads them.
        """
        self.session.check_state(state)
        folder = checked_path("path", path)
        snapshot = checkpoints.snapshot(self.session, state, {} if extra is None else extra)
        snapshot.write(folder)

    @telling()
    def restore(self, path: str | Path) -> State:
        """Returns the state that `save` wrote, placed according to this pipeline's plan."""
        return checkpoints.restore(self.session, checked_path("path", path))
