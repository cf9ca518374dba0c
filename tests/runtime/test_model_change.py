"""Models that change while they are trained: what stays is what it was, what comes back too."""

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cost import measure
from jvpipe.ir.buffers import HOST
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.runtime.state import model_change
from jvpipe.runtime.state.model_change import ModelSwitch
from tests.grid import grid

MICRO, WIDTH = 4, 4
Names = tuple[str, ...]
A: Names = ("a", "b", "c", "d")
B: Names = ("a", "x", "c", "y", "z")
C: Names = ("a", "x", "d")
STREAM = (A, B, C, A)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def params_of(names: Names) -> dict[str, Any]:
    """A block's values follow from its name."""
    found = {}
    for name in (*names, "head"):
        rng = np.random.default_rng(ord(name[0]))
        kernel = rng.normal(0, 0.5, (WIDTH, WIDTH)).astype(np.float32)
        found[name] = {"kernel": kernel, "bias": np.zeros((1, WIDTH), np.float32)}
    return found


@cache
def loss_of(names: Names) -> Callable[[Any, Any, Any], jax.Array]:
    """The head's bias is tied: the first block adds it too."""

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch["x"] + params["head"]["bias"]
        for name in names:
            x = x + jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
        return jnp.mean((x @ params["head"]["kernel"] + params["head"]["bias"] - batch["y"]) ** 2)

    return loss_fn


def batches() -> Any:
    rng = np.random.default_rng(0)
    while True:
        x = rng.normal(size=(8, WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.roll(x, 1, axis=1)}


def started(
    stages: Any = 2, names: Names = A, **options: Any
) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    optimizer = options.pop("optimizer", OPTIMIZER)
    pipe = jvpipe.Pipeline(loss_of(names), optimizer, stages, MICRO, planner="even", **options)
    return pipe, pipe.init(params_of(names), next(batches()), None)


def stepped(
    pipe: jvpipe.Pipeline, state: jvpipe.State, given: Any, steps: int = 2
) -> tuple[jvpipe.State, list[float]]:
    losses = []
    for batch in islice(given, steps):
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    jax.block_until_ready(state)
    assert sum(pipe.ledger.live[:HOST]) == sum(x.nbytes for x in state.arrays), "something leaked"
    assert pipe.ledger.host_bytes == parked_bytes(pipe), "what is parked is counted"
    return state, losses


def parked_bytes(pipe: jvpipe.Pipeline) -> int:
    return sum(value.nbytes for value in pipe.session.known_models.parked.values())


def streamed(
    pipe: jvpipe.Pipeline, state: jvpipe.State, stream: Sequence[Names] = STREAM
) -> tuple[list[float], dict[Names, Any]]:
    """Losses of a stream of models, and the parameters after the last."""
    losses, given, present, after = [], batches(), A, {}
    for names in stream:
        if names != present or after:
            state = pipe.update_model(state, loss_of(names), params_of(names))
        state, found = stepped(pipe, state, given)
        losses += found
        present, after[names] = names, pipe.params(state)
    return losses, after


def plainly(stream: Sequence[Names]) -> tuple[list[float], dict[Names, Any]]:
    """The same without a pipeline: values and moments live in dictionaries by name."""
    values, moments, count = {}, {}, jnp.zeros((), jnp.int32)
    losses, given, after = [], batches(), {}
    for names in stream:
        kept = (*names, "head")
        values |= {name: value for name, value in params_of(names).items() if name not in values}
        params: Any = {name: values[name] for name in kept}
        first: Any = OPTIMIZER.init(params)
        clip, (adam, *rest) = first
        mu, nu = (
            {n: moments[n][i] if n in moments else fresh[n] for n in kept}
            for i, fresh in enumerate(adam[1:])
        )
        state: Any = (clip, (adam._replace(count=count, mu=mu, nu=nu), *rest))

        @jax.jit
        def step(
            params: Any, state: Any, batch: Any, names: Names = names
        ) -> tuple[Any, Any, jax.Array]:
            loss, gradient = jax.value_and_grad(loss_of(names))(params, batch, None)
            updates, state = OPTIMIZER.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, loss

        for batch in islice(given, 2):
            params, state, loss = step(params, state, batch)
            losses.append(float(loss))
        adam = state[1][0]
        values, count = values | params, adam.count
        moments |= {name: (adam.mu[name], adam.nu[name]) for name in kept}
        after[names] = params
    return losses, after


def test_a_stream_of_models_is_what_dictionaries_by_name_make_of_it() -> None:
    losses, after = streamed(*started())
    expected, plain = plainly(STREAM)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for names in after:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            after[names],
            plain[names],
        )


@pytest.mark.parametrize("stages", [3, jvpipe.Plan.from_cuts([1, 4])])
def test_no_cut_changes_a_bit_of_a_stream_of_models(stages: Any) -> None:
    expected, plain = streamed(*started(1))
    losses, after = streamed(*started(stages))
    assert losses == expected
    jax.tree.map(np.testing.assert_array_equal, after, plain)


def test_the_same_model_again_changes_nothing() -> None:
    pipe, state = started()
    expected = stepped(pipe, state, batches(), 4)[1]
    pipe, state = started()
    given = batches()
    state, losses = stepped(pipe, state, given)
    arrays = state.arrays
    state = pipe.update_model(state, loss_of(A), params_of(A))
    assert all(a is b for a, b in zip(state.arrays, arrays, strict=True))
    assert losses + stepped(pipe, state, given)[1] == expected


def test_what_is_removed_comes_back_as_it_left() -> None:
    pipe, state = started()
    state, _ = stepped(pipe, state, given := batches())
    left = pipe.params(state)
    state = pipe.update_model(state, loss_of(B), params_of(B))
    change = pipe.session.model_history[-1]
    assert change.parked == ("b/bias", "b/kernel", "d/bias", "d/kernel")
    assert [path[0] for path in change.new] == ["x", "x", "y", "y", "z", "z"]
    state, _ = stepped(pipe, state, given)
    trained = pipe.params(state)
    shapes = jax.eval_shape(lambda: params_of(A))
    state = pipe.update_model(state, loss_of(A), shapes)
    back = pipe.params(state)
    for name, found in (
        ("a", trained),
        ("c", trained),
        ("head", trained),
        ("b", left),
        ("d", left),
    ):
        jax.tree.map(np.testing.assert_array_equal, back[name], found[name])
    assert (trained["a"]["kernel"] != left["a"]["kernel"]).any()
    assert pipe.session.model_history[-1].returned == change.parked


def test_the_host_holds_what_is_parked_within_its_limit() -> None:
    """b and d leave for B, then x, y and z while they come back: each with two moments."""
    block = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    pipe, state = started()
    assert pipe.ledger.host_bytes == 0
    state = pipe.update_model(state, loss_of(B), params_of(B))
    assert pipe.ledger.host_bytes == pipe.ledger.host_peak_bytes == 2 * block
    state = pipe.update_model(state, loss_of(A), params_of(A))
    assert pipe.ledger.host_bytes == 3 * block
    assert pipe.ledger.host_peak_bytes == 5 * block, "they come back while others leave"

    pipe, state = started(host_memory_limit=2 * block - 1)
    state, before = stepped(pipe, state, given := batches())
    with pytest.raises(
        MemoryLimitExceeded, match=f"the host would hold {2 * block:,} bytes"
    ) as error:
        pipe.update_model(state, loss_of(B), params_of(B))
    assert error.value.smallest_limit_bytes == 2 * block
    assert (pipe.session.model_history, pipe.ledger.host_bytes) == ([], 0)
    assert before + stepped(pipe, state, given)[1] == stepped(*started(), batches(), 4)[1]

    pipe, state = started(host_memory_limit=4 * block)
    state = pipe.update_model(state, loss_of(B), params_of(B))
    with pytest.raises(MemoryLimitExceeded, match=f"the host would hold {5 * block:,} bytes"):
        pipe.update_model(state, loss_of(A), params_of(A))
    assert pipe.ledger.host_bytes == 2 * block
    state, _ = stepped(pipe, state, batches())


def test_what_is_parked_leaves_no_room_for_what_is_swapped() -> None:
    names, other = ("b", "a", "c", "d"), ("b", "a", "x", "y")
    pipe, state = started(fates={"*": "swap"})
    stepped(pipe, state, batches())
    swapped = pipe.ledger.host_peak_bytes
    assert swapped > 0
    pipe, state = started(fates={"*": "swap"}, host_memory_limit=swapped)
    state = pipe.update_model(state, loss_of(names), params_of(names))  # nothing leaves
    with pytest.raises(MemoryLimitExceeded, match=r"the host would hold .* parked 480"):
        pipe.update_model(state, loss_of(other), params_of(other))


def test_another_run_finds_nothing_parked(tmp_path: Any) -> None:
    pipe, state = started(schedule="2bw", optimizer=optax.adamw(1e-2))
    for state, _ in pipe.run(state, batches(), 2):  # noqa: B007, B020
        pass
    pipe.save(tmp_path / "in flight", state)
    for names in (C, A):
        state = pipe.update_model(state, loss_of(names), params_of(names))
    assert pipe.ledger.host_bytes == parked_bytes(pipe) > 0
    state = pipe.restore(tmp_path / "in flight")
    assert state.stream_steps > 0
    assert pipe.ledger.host_bytes == parked_bytes(pipe) == 0

    pipe, state = started()
    state = pipe.update_model(state, loss_of(C), params_of(C))
    state = pipe.init(params_of(C), next(batches()), None)
    assert pipe.ledger.host_bytes == 0
    state = pipe.update_model(state, loss_of(A), params_of(A))
    assert pipe.session.model_history[-1].returned == ()
    assert [path[0] for path in pipe.session.model_history[-1].new] == ["b", "b", "c", "c"]


def test_layers_of_a_scan_are_in_both_models_or_in_neither() -> None:
    """Otherwise the trained values of the others would be lost."""

    def scanned(params: Any, batch: Any, rng: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["s"])
        return jnp.mean(x**2)

    def indexed(params: Any, batch: Any, rng: Any) -> jax.Array:
        for i in range(4):
            batch = jnp.tanh(batch @ params["s"][i])
        return jnp.mean(batch**2)

    four, six = ({"s": np.stack([np.eye(4, dtype=np.float32)] * n)} for n in (4, 6))
    ones, scan, whole = np.ones((MICRO, 4), np.float32), "4 layers that the loss scans", "one array"
    for first, second, params, told in (
        (scanned, indexed, four, f"'s' is {whole} in the new model, {scan}"),
        (indexed, scanned, four, f"'s' is {scan} over in the new model, {whole}"),
        (scanned, scanned, six, f"'s' is 6 layers .* in the new model, {scan}"),
    ):
        pipe = jvpipe.Pipeline(first, OPTIMIZER, 1, MICRO, planner="even")
        state, _ = pipe.step(pipe.init(four, ones, None), ones)
        with pytest.raises(ValueError, match=told):
            pipe.update_model(state, second, params)
        pipe.step(state, ones)  # nothing has changed


@pytest.mark.parametrize("schedule", grid(["2bw", "pipemare"], "2bw"))
def test_a_stream_in_flight_is_drained_first(schedule: str) -> None:
    def run(*, drains: bool) -> tuple[list[float], Any]:
        pipe, state = started(2, schedule=schedule, optimizer=optax.adamw(1e-2))
        losses, given = [], batches()
        for names in (A, B, A):
            if names != A or losses:
                state = pipe.drain(state) if drains else state
                state = pipe.update_model(state, loss_of(names), params_of(names))
            for state, metrics in pipe.run(state, given, 3):  # noqa: B007, B020
                losses.append(float(metrics["loss"]))
            assert state.stream_steps > 0
        return losses, pipe.params(state)

    (losses, params), (expected, plain) = run(drains=False), run(drains=True)
    assert losses == expected
    jax.tree.map(np.testing.assert_array_equal, params, plain)


def compiled_in(run: Callable[[], Any]) -> int:
    """How many programs are compiled meanwhile."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(found)


def test_a_model_seen_before_is_neither_traced_nor_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, state = started()
    _, after = streamed(pipe, state)
    assert after

    def traced(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("traced again")

    pipe, state = started()
    for names in (B, C, A):
        state = pipe.update_model(state, loss_of(names), params_of(names))
    monkeypatch.setattr("jvpipe.session.compiled_plans.trace_model", traced)
    assert compiled_in(lambda: streamed(pipe, state)) == 0
    assert compiled_in(lambda: jax.jit(lambda x: x + 54321).lower(1.0).compile()) > 0


def test_a_model_is_compiled_ahead_in_the_background() -> None:
    pipe, state = started(optimizer=optax.adamw(0.02))
    names: Names = ("a", "x", "q", "c", "d", "r")
    state, _ = stepped(pipe, state, given := batches(), 1)
    ahead = threading.Thread(
        target=pipe.precompile, args=(loss_of(names), jax.eval_shape(lambda: params_of(names)))
    )
    ahead.start()
    state, losses = stepped(pipe, state, given, 1)
    ahead.join()
    state, more = stepped(pipe, state, given, 1)
    assert [*losses, *more] == stepped(*started(optimizer=optax.adamw(0.02)), batches(), 3)[1][1:]

    def change() -> None:
        changed = pipe.update_model(state, loss_of(names), params_of(names))
        turned = jvpipe.Plan.from_cuts(pipe.plan.cuts, devices=[1, 0])
        stepped(pipe, pipe.migrate(changed, turned), given)

    assert compiled_in(change) == 0


@pytest.mark.parametrize(
    ("optimizer", "programs"), [(optax.adamw(0.02), 0), (optax.chain(OPTIMIZER), 1)]
)
def test_an_unseen_model_of_known_layers_compiles_nothing_but_a_norm_over_all(
    optimizer: Any, programs: int
) -> None:
    """Whatever its number of layers and wherever they are cut; the norm is compiled once for each
    device.
    """
    pipe, state = started(optimizer=optimizer)
    pipe.precompile(loss_of(B), params_of(B))
    names: Names = ("c", "x", "a", "q", "b", "r", "d", "y")

    def change() -> None:
        pipe.precompile(loss_of(names), jax.eval_shape(lambda: params_of(names)))
        stepped(pipe, pipe.update_model(state, loss_of(names), params_of(names)), batches())

    assert compiled_in(change) == programs * 2


def test_the_limit_is_kept_or_nothing_happens() -> None:
    """With room for one model at a time what leaves goes first; with less the change is refused."""
    names: Names = ("u", "v", "w", "t")
    pipe, state = started()
    state = pipe.update_model(state, loss_of(names), params_of(names))
    assert pipe.session.model_history[-1].how == "beside"
    expected = stepped(pipe, state, batches())[1]
    smallest = max(peak.bytes for peak in pipe.session.compiled.peaks)
    ways = set()
    for limit in (smallest, 2 * smallest):
        pipe, state = started(memory_limit=limit)
        state = pipe.update_model(state, loss_of(names), params_of(names))
        ways.add(pipe.session.model_history[-1].how)
        assert stepped(pipe, state, batches())[1] == expected
        assert max(pipe.ledger.peak[:HOST]) <= limit
    pipe, state = started(memory_limit=smallest)
    state, before = stepped(pipe, state, given := batches())
    many: Names = (*A, "e", "f", "g", "h", "i", "j")
    with pytest.raises(MemoryLimitExceeded, match=r"the limit is|of the limit|keeps the limit"):
        pipe.update_model(state, loss_of(many), params_of(many))
    assert pipe.session.model_history == []
    assert before + stepped(pipe, state, given)[1] == stepped(*started(), batches(), 4)[1]


@pytest.mark.thorough
def test_layers_are_timed_in_the_room_that_the_present_model_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wide layer is not: its seconds are estimated, and the plan keeps the limit."""
    needs, estimated = list[int](), list[Any]()
    timed, guessed = measure._seconds, measure._estimated

    def seconds(executable: Any, program: Any, device: Any) -> list[float]:
        found = executable.memory_analysis()
        beside = found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
        needs.append(found.argument_size_in_bytes + beside)
        return timed(executable, program, device)

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch["x"]
        for kernel in params.values():
            x = x + jnp.tanh(x @ kernel) @ kernel.T
        return jnp.mean((x - batch["y"]) ** 2)

    def kernels(*widths: int) -> dict[str, np.ndarray]:
        return {
            f"{n}_{width}": np.full((WIDTH, width), 0.1, np.float32)
            for n, width in enumerate(widths)
        }

    def guesses(*args: Any) -> measure.Runs:
        found = guessed(*args)
        estimated.extend(found)
        return found

    monkeypatch.setattr(measure, "_seconds", seconds)
    monkeypatch.setattr(measure, "_estimated", guesses)
    batch = next(batches())
    room, plan = 20_000, jvpipe.Plan.from_cuts([3, 3])  # the widest layer needs 35,000
    free = jvpipe.Pipeline(loss_fn, OPTIMIZER, plan, MICRO)
    free.init(kernels(800, 20, 20), batch, None)
    limit = free.session.compiled.peaks[0].bytes + room
    pipe = jvpipe.Pipeline(loss_fn, OPTIMIZER, plan, MICRO, memory_limit=limit)
    state = pipe.init(kernels(800, 20, 20), batch, None)
    assert not needs, "a given plan asks for no seconds"
    state = pipe.update_model(state, jax.tree_util.Partial(loss_fn), kernels(119, 21, 400))
    assert needs, "there was room for the narrow ones"
    assert max(needs) <= room
    assert estimated, "there was none for the wide one"
    assert pipe.session.compiled_plans.planned is not None
    assert 0 < pipe.session.compiled_plans.planned.problem.costs.layers[2].forward_s < 1
    pipe.step(state, batch)
    assert max(pipe.ledger.peak[:HOST]) <= limit


def test_mistakes_are_told_and_nothing_has_happened() -> None:
    pipe, state = started(schedule="pipedream", optimizer=optax.sgd(0.1))
    given = batches()
    for state, _ in pipe.run(state, given, 2):  # noqa: B007, B020
        pass
    lacking, wider, shapes = params_of(C), params_of(C), jax.eval_shape(lambda: params_of(C))
    del lacking["x"]["bias"]
    wider["a"]["bias"] = np.zeros((2, WIDTH), np.float32)
    with pytest.raises(ValueError, match="reads parameter 'x/bias', which params lack"):
        pipe.update_model(state, loss_of(C), lacking)
    with pytest.raises(
        ValueError,
        match=r"'a/bias' is float32\[2, 4\] in the new model, float32\[1, 4\] in the pres",
    ):
        pipe.update_model(state, loss_of(C), wider)
    with pytest.raises(ValueError, match="parameter 'x/bias' is new: its values must be given"):
        pipe.update_model(state, loss_of(C), shapes)
    with pytest.raises(ValueError, match="2 stages need at least as many layers"):
        pipe.update_model(
            state,
            lambda params, batch, rng: jnp.mean(params["a"] * batch["x"]),
            {"a": np.ones((1, 1), np.float32)},
        )
    assert pipe.session.model_history == []
    losses = [float(metrics["loss"]) for _, metrics in pipe.run(state, given, 2)]
    other = started(schedule="pipedream", optimizer=optax.sgd(0.1))
    assert (
        losses
        == [float(metrics["loss"]) for _, metrics in other[0].run(other[1], batches(), 4)][2:]
    )


@pytest.mark.parametrize("how", ["beside", "by host", "in flight"])
@pytest.mark.parametrize(
    "target", ["jvpipe.runtime.engine.placing.Placing.initialize_optimizer", "jax.device_put"]
)
def test_a_failure_on_the_way_leaves_the_state_whole(
    how: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: Names = ("a", "v", "w", "t") if how == "by host" else B
    options: Any = (
        {"schedule": "pipedream", "optimizer": optax.sgd(0.1)} if how == "in flight" else {}
    )
    pipe, state = started(**options)
    smallest = max(peak.bytes for peak in pipe.session.compiled.peaks)
    if how == "by host":  # room for one model at a time
        pipe, state = started(memory_limit=smallest)

    def trained(pipe: Any, state: Any, given: Any, steps: int) -> tuple[Any, list[float]]:
        losses = []
        for state, metrics in pipe.run(state, islice(given, steps), steps):  # noqa: B007, B020
            losses.append(float(metrics["loss"]))
        return state, losses

    state, before = trained(pipe, state, given := batches(), 2)
    put, count = jax.device_put, iter(range(1000))

    def fails(*args: Any, **options: Any) -> Any:
        if target == "jax.device_put" and next(count) != 2:
            return put(*args, **options)
        raise RuntimeError("no link")

    with monkeypatch.context() as broken:
        broken.setattr(target, fails)
        with pytest.raises(jvpipe.StageError, match="could not be changed: no link") as told:
            pipe.update_model(state, loss_of(names), params_of(names))
    assert pipe.session.model_history == []
    assert not pipe.session.known_models.parked
    state = told.value.state
    assert sum(pipe.ledger.live[:HOST]) == sum(x.nbytes for x in state.arrays)
    found = before + trained(pipe, state, given, 2)[1]
    other, start = started(**options)
    start, expected = trained(other, start, given := batches(), 2)
    assert found == expected + trained(other, other.drain(start), given, 2)[1]
    if how == "by host":
        assert max(pipe.ledger.peak[:HOST]) <= smallest


def test_model_state_stays_leaves_and_comes_back_too() -> None:
    @cache
    def counting(names: Names) -> Any:
        def loss_fn(params: Any, seen: Any, batch: Any, rng: Any) -> Any:
            return loss_of(names)(params, batch, rng), {name: seen[name] + 1 for name in names}

        return loss_fn

    def zeros(names: Names) -> Any:
        return {name: np.zeros((), np.int32) for name in names}

    pipe = jvpipe.Pipeline(counting(A), OPTIMIZER, 2, MICRO, planner="even", has_state=True)
    state, given = pipe.init(params_of(A), next(batches()), None, zeros(A)), batches()
    state, _ = stepped(pipe, state, given)
    state = pipe.update_model(state, counting(C), params_of(C), zeros(C))
    state, _ = stepped(pipe, state, given, 1)
    assert pipe.model_state(state) == {"a": 12, "x": 4, "d": 12}
    state = pipe.update_model(state, counting(A), params_of(A), zeros(A))
    assert pipe.model_state(state) == {"a": 12, "b": 8, "c": 8, "d": 12}
    state = pipe.update_model(state, counting(A), params_of(A))
    assert pipe.model_state(state)["a"] == 12


def test_a_changed_model_is_saved_and_restored(tmp_path: Any) -> None:
    pipe, state = started()
    state, _ = stepped(pipe, state, given := batches())
    state = pipe.update_model(state, loss_of(B), params_of(B))
    pipe.save(tmp_path / "state", state)
    expected = stepped(pipe, state, given)[1]
    other = jvpipe.Pipeline(loss_of(B), OPTIMIZER, 1, MICRO, planner="even")
    again = batches()
    list(islice(again, 2))
    assert stepped(other, other.restore(tmp_path / "state"), again)[1] == expected


def test_what_stays_may_be_copied_to_other_places_while_the_rest_leaves_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The counts of Adam stay on their places, and new layers get copies of them."""
    names: Names = (*A, "u", "v", "w")
    pipe, state = started()
    state = pipe.update_model(state, loss_of(names), params_of(names))
    expected = stepped(pipe, state, batches())[1]
    by_host = partial(ModelSwitch, by_host=True)
    monkeypatch.setattr(model_change, "ModelSwitch", lambda origins, **_: by_host(origins))
    pipe, state = started()
    state = pipe.update_model(state, loss_of(names), params_of(names))
    assert pipe.session.model_history[-1].how == "by host"
    assert stepped(pipe, state, batches())[1] == expected


def test_the_optimizer_s_state_on_the_host_counts_while_models_change() -> None:
    options: dict[str, Any] = {"state_fates": {"*": "swap"}, "optimizer": optax.adamw(1e-2)}
    pipe, state = started(**options)
    pipe.update_model(state, loss_of(B), params_of(B))
    peak = pipe.ledger.host_peak_bytes
    pipe, state = started(host_memory_limit=peak, **options)
    pipe.update_model(state, loss_of(B), params_of(B))
    assert pipe.ledger.host_peak_bytes == peak
    pipe, state = started(host_memory_limit=peak - 1, **options)
    with pytest.raises(MemoryLimitExceeded, match=f"the host would hold {peak:,} bytes"):
        pipe.update_model(state, loss_of(B), params_of(B))
