"""The facade: what it gives, what it refuses, and that it keeps nothing it should not."""

import gc
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe

D = 8
PARAMS = [(0.4 * np.eye(D, dtype=np.float32) + 0.1, np.zeros(D, np.float32)) for _ in range(6)]


def batch(size: int = 8) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(size, D)).astype(np.float32)
    return {"x": x, "y": np.flip(x, 1).copy()}


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch["x"]
    for w, b in params:
        x = jnp.tanh(x @ w + b[None, :])
    return jnp.mean((x - batch["y"]) ** 2)


def pipeline(loss: Any = loss_fn, optimizer: Any = None, **kwargs: Any) -> jvpipe.Pipeline:
    kwargs = {"stages": 2, "microbatches": 4, "planner": "even"} | kwargs
    return jvpipe.Pipeline(loss, optimizer or optax.adam(1e-2), **kwargs)


def trained(
    pipe: jvpipe.Pipeline, state: jvpipe.State, steps: int
) -> tuple[jvpipe.State, list[float]]:
    losses = []
    for _ in range(steps):
        state, metrics = pipe.step(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# What it gives


def test_the_callers_arrays_stay_theirs() -> None:
    params = jax.device_put(PARAMS)
    pipe = pipeline()
    state, _ = trained(pipe, pipe.init(params, batch(), None), 2)
    assert_same(params, PARAMS)
    assert jax.tree.structure(pipe.params(state)) == jax.tree.structure(PARAMS)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(pipe.params(state)))


def test_the_callers_batch_may_be_overwritten_at_once() -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, batch(), None)
    given = batch()
    state, metrics = pipe.step(state, given)
    given["x"][:] = np.nan
    assert np.isfinite(float(metrics["loss"]))


def aligned(value: float) -> np.ndarray:
    """An array at a multiple of 64 bytes, whose memory JAX would share with a CPU device."""
    room = np.zeros(D * D * 4 + 64, np.uint8)
    begin = -room.ctypes.data % 64
    array = room[begin : begin + D * D * 4].view(np.float32).reshape(D, D)
    array[:] = value
    return array


def test_the_callers_numpy_arrays_may_be_overwritten_too() -> None:
    """A frozen parameter, a constant of the loss, the state of the optimizer, and a new parameter."""
    shift, momentum, x = aligned(0.1), aligned(0.1), batch()["x"]
    params = {name: aligned(0.1) for name in ("base", "top")}
    more = {"base": params["base"], "top": params["top"], "new": aligned(0.1)}

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        hidden = jnp.tanh(batch @ params["base"] + batch @ shift)
        return jnp.mean((hidden @ params["top"]) ** 2) + jnp.sum(params.get("new", shift))

    def overwritten(state: jvpipe.State, *arrays: np.ndarray) -> jvpipe.State:
        expected = float(pipe.evaluate(state, x)["loss"])
        kept = [array.copy() for array in arrays]
        for array in arrays:
            array[:] = 7
        assert float(pipe.evaluate(state, x)["loss"]) == expected
        for array, copy in zip(arrays, kept, strict=True):
            array[:] = copy
        return state

    pipe = pipeline(loss, frozen=["base"], stages=1)
    state = overwritten(pipe.init(params, x, None), *params.values(), shift)
    adam, *rest = pipe.optimizer_state(state)
    held = adam._replace(mu=adam.mu | {"top": momentum})
    state = pipe.with_optimizer_state(state, (held, *rest))
    momentum[:] = 7
    np.testing.assert_array_equal(pipe.optimizer_state(state)[0].mu["top"], aligned(0.1))
    overwritten(pipe.update_model(state, lambda p, b, r: loss(p, b, r), more), *more.values())


def test_host_parameters_outlive_later_steps() -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, batch(), None)
    first = pipe.params(state)
    kept = jax.tree.map(np.copy, first)
    trained(pipe, state, 3)
    assert_same(first, kept)


def test_init_from_a_function_equals_init_from_its_arrays() -> None:
    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 6)
        return [(jax.random.normal(k, (D, D)) * np.float32(0.3), jnp.zeros(D)) for k in keys]

    key = jax.random.key(3)
    from_function, from_arrays = pipeline(stages=3), pipeline(stages=1)
    a = from_function.init(make, batch(), key)
    b = from_arrays.init(from_function.params(a), batch(), key)
    for x, y in zip(
        jax.tree.leaves(from_function.params(a)), jax.tree.leaves(make(key)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    a, ours = trained(from_function, a, 2)
    b, theirs = trained(from_arrays, b, 2)
    assert ours == theirs
    assert_same(from_function.params(a), from_arrays.params(b))


def test_a_model_larger_than_any_device_is_allowed_trains() -> None:
    total = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    one = pipeline(stages=1)
    one.init(PARAMS, batch(), None)
    alone = max(one.ledger.peak_bytes.values())
    limit = alone // 2
    pipe = pipeline(stages=6, memory_limit=limit)

    def make(key: jax.Array) -> Any:
        return [
            (jax.random.normal(jax.random.fold_in(key, i), (D, D)), jnp.zeros(D)) for i in range(6)
        ]

    state = pipe.init(make, batch(), jax.random.key(0))
    state, losses = trained(pipe, state, 3)
    assert all(np.isfinite(losses))
    held = pipe.ledger.peak_bytes
    assert (
        max(held.values()) <= limit < 3 * total
    )  # parameters and Adam's two moments take 3 times the total
    with pytest.raises(
        jvpipe.MemoryLimitExceeded, match=r"would hold .* bytes at task .*parameter"
    ) as refused:
        pipeline(stages=1, memory_limit=limit).init(PARAMS, batch(), None)
    assert refused.value.smallest_limit_bytes > limit
    pipeline(stages=1, memory_limit=refused.value.smallest_limit_bytes).init(PARAMS, batch(), None)


def test_layers_stacked_for_a_scan_are_cut_apart() -> None:
    def scanned(params: Any, b: Any, rng: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (jnp.tanh(x @ p[0] + p[1][None, :]), None), b["x"], params)
        return jnp.mean((x - b["y"]) ** 2)

    stacked = tuple(np.stack(leaves) for leaves in zip(*PARAMS, strict=True))
    pipe, other = pipeline(scanned, stages=3), pipeline(stages=2)
    state, losses = trained(pipe, pipe.init(stacked, batch(), None), 2)
    state_of_other, same = trained(other, other.init(PARAMS, batch(), None), 2)
    assert len(pipe.session.graph.layers) == 6
    np.testing.assert_allclose(losses, same, rtol=1e-6)
    listed = other.params(state_of_other)
    for ours, theirs in zip(pipe.params(state), zip(*listed, strict=True), strict=True):
        np.testing.assert_allclose(ours, np.stack(theirs), rtol=1e-5, atol=1e-6)
    made = pipeline(scanned, stages=2)
    again = made.init(lambda key: jax.tree.map(jnp.asarray, stacked), batch(), jax.random.key(0))
    assert_same(made.params(again), stacked)


def test_evaluate_changes_nothing_and_agrees_with_the_loss() -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, batch(), None)
    before = pipe.params(state)
    evaluated = float(pipe.evaluate(state, batch())["loss"])
    assert_same(pipe.params(state), before)
    _, (loss,) = trained(pipe, state, 1)
    assert evaluated == pytest.approx(loss, rel=1e-6)


def test_run_is_a_stream_of_steps() -> None:
    pipe, other = pipeline(), pipeline()
    state = pipe.init(PARAMS, batch(), None)
    seen = [
        float(metrics["loss"])
        for _, metrics in pipe.run(state, iter(lambda: batch(), None), num_steps=3)
    ]
    assert seen == trained(other, other.init(PARAMS, batch(), None), 3)[1]


def test_several_stages_share_a_device_when_asked() -> None:
    device = jax.devices()[0]
    pipe, other = pipeline(stages=3, devices=[device] * 3), pipeline(stages=3)
    assert list(pipe.ledger.peak_bytes) == [device]
    ours = trained(pipe, pipe.init(PARAMS, batch(), None), 2)[1]
    assert ours == trained(other, other.init(PARAMS, batch(), None), 2)[1]


def test_a_given_plan_is_followed_and_survives_json(tmp_path: Path) -> None:
    plan = jvpipe.Plan.from_cuts([4, 1, 1])
    plan.save(tmp_path / "plan.json")
    pipe = pipeline(stages=jvpipe.Plan.load(tmp_path / "plan.json"))
    state = pipe.init(PARAMS, batch(), None)
    assert pipe.plan.cuts == (4, 1, 1)
    assert np.isfinite(trained(pipe, state, 1)[1][0])
    assert "layer   5" in pipe.explain()


def test_explain_names_every_layer_and_tied_parameters() -> None:
    def tied(params: Any, b: Any, rng: Any) -> jax.Array:
        x = b["x"]
        for w in (params["first"], params["second"], params["first"]):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    pipe = pipeline(tied)
    pipe.init(
        {"first": np.eye(D, dtype=np.float32), "second": np.eye(D, dtype=np.float32)}, batch(), None
    )
    assert "parameter 'first' is tied: layers 0, 2 read it, layer 0 owns it" in pipe.explain()


def test_metrics_carry_aux_and_the_norm_of_the_gradient() -> None:
    def with_aux(params: Any, b: Any, rng: Any) -> Any:
        loss = loss_fn(params, b, rng)
        return loss, {
            "half": loss / 2,
            "first": b["x"][:, 0],
            "mean": jvpipe.Weighted(b["x"].sum(), jnp.float32(2 * D)),
        }

    pipe = pipeline(with_aux, has_aux=True, grad_norm=True)
    _, metrics = pipe.step(pipe.init(PARAMS, batch(), None), batch())
    aux = metrics["aux"]
    np.testing.assert_allclose(aux["half"], metrics["loss"] / 2, rtol=1e-6)
    np.testing.assert_array_equal(aux["first"].ravel(), batch()["x"][:, 0])
    np.testing.assert_allclose(aux["mean"], batch()["x"].mean(), rtol=1e-4)
    plain = jax.grad(lambda p: loss_fn(p, batch(), None))(PARAMS)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(plain), rtol=1e-4)


# What it keeps


def test_after_a_step_only_the_state_is_alive() -> None:
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    pipe = pipeline(stages=3)
    state = pipe.init(PARAMS, batch(), None)
    for _ in range(2):
        state = pipe.step(state, batch())[0]
    pipe.wait(state)
    gc.collect()
    alive = [x for x in jax.live_arrays() if id(x) not in before]
    extra = [x for x in alive if all(x is not y for y in state.arrays)]
    assert [(x.shape, x.dtype) for x in extra] == []
    wanted = sum(
        x.nbytes for x in jax.tree.leaves((PARAMS, optax.adam(1e-2).init(jax.device_put(PARAMS))))
    )
    counts = sum(x.nbytes for x in state.arrays) - wanted
    assert counts == 4 * (
        len(pipe.session.graph.layers) - 1
    )  # each layer has a step count of its own
    held = sum(pipe.ledger.live_bytes.values())
    assert held == sum(x.nbytes for x in alive)


def test_200_steps_do_not_grow_the_host() -> None:
    import resource

    pipe = pipeline(stages=2, group=True)  # else groups are compiled beside these steps
    state = pipe.init(PARAMS, batch(), None)
    state, _ = trained(pipe, state, 50)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays = len(jax.live_arrays())
    state, _ = trained(pipe, state, 200)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB
    assert len(jax.live_arrays()) <= arrays + 2


@pytest.mark.parametrize("ready", [True, False])
def test_a_checkpoint_is_restored_under_another_cut(tmp_path: Path, ready: bool) -> None:
    pipe = pipeline(stages=2)
    state, _ = trained(pipe, pipe.init(PARAMS, batch(), jax.random.key(1)), 2)
    pipe.save(tmp_path / "saved", state, {"position": 7})
    state, losses = trained(pipe, state, 2)
    other = pipeline(stages=3, schedule="gpipe")
    if ready:
        other.init(jax.tree.map(np.zeros_like, PARAMS), batch(), jax.random.key(2))
    resumed = other.restore(tmp_path / "saved")
    assert resumed.step == 2
    resumed, again = trained(other, resumed, 2)
    assert again == losses
    assert_same(other.params(resumed), pipe.params(state))
    assert jvpipe.checkpoint_extra(tmp_path / "saved") == {"position": 7}


def test_a_checkpoint_may_replace_an_older_one(tmp_path: Path) -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, batch(), None)
    pipe.save(tmp_path / "saved", state)
    state, _ = trained(pipe, state, 1)
    pipe.save(tmp_path / "saved", state)
    assert pipe.restore(tmp_path / "saved").step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


# What begins again


@pytest.mark.parametrize(
    ("params", "size"),
    [(PARAMS[:6], 8), (PARAMS[:3], 8), (PARAMS[:4], 16), ([(w, w[0]) for w, _ in PARAMS[:4]], 8)],
    ids=["deeper", "shallower", "larger batch", "other values"],
)
def test_a_second_run_of_other_shapes_trains_as_in_a_new_pipeline(params: Any, size: int) -> None:
    def run(pipe: jvpipe.Pipeline) -> tuple[list[float], Any]:
        state, losses = pipe.init(params, batch(size), None), []
        for _ in range(2):
            state, metrics = pipe.step(state, batch(size))
            losses.append(float(metrics["loss"]))
        return losses, pipe.params(state)

    used = pipeline(memory_limit="1GB")
    trained(used, used.init(PARAMS[:4], batch(), None), 1)
    (losses, after), (expected, fresh) = run(used), run(pipeline(memory_limit="1GB"))
    assert losses == expected
    assert_same(after, fresh)
    assert all(
        not np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True)
    )
    assert [len(s.layers) for s in used.plan.stages] == [
        len(params) - len(params) // 2,
        len(params) // 2,
    ]


def test_a_second_run_of_the_same_shapes_keeps_the_plan_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, batch(), None)
    trained(pipe, pipe.migrate(state, jvpipe.Plan.from_cuts([5, 1])), 1)
    monkeypatch.setattr("jvpipe.programs.store.ProgramStore._compiled_for", None)
    monkeypatch.setattr("jvpipe.session.model_planner.decide", None)
    _, losses = trained(pipe, pipe.init(PARAMS, batch(), None), 1)
    assert pipe.plan.cuts == (5, 1)
    monkeypatch.undo()
    fresh = pipeline()
    assert losses == trained(fresh, fresh.init(PARAMS, batch(), None), 1)[1]


def test_a_second_run_may_carry_another_model_state() -> None:
    def loss(params: Any, state: Any, b: Any, rng: Any) -> Any:
        return loss_fn(params, b, rng), jax.tree.map(lambda x: x + 1, state)

    pipe = pipeline(loss, has_state=True)
    pipe.init(PARAMS, batch(), None, {"a": np.zeros(3)})
    state, _ = pipe.step(
        pipe.init(PARAMS, batch(), None, {"a": np.zeros(2), "b": np.ones(4)}), batch()
    )
    assert_same(pipe.model_state(state), {"a": np.full(2, 4), "b": np.full(4, 5)})


def test_a_run_that_cannot_begin_leaves_the_one_before() -> None:
    pipe = pipeline(memory_limit="100KB")
    state, first = trained(pipe, pipe.init(PARAMS[:3], batch(), None), 1)
    with pytest.raises(jvpipe.MemoryLimitExceeded):
        pipe.init(PARAMS[:3], batch(8000), None)
    with pytest.raises(ValueError, match="not an array"):
        pipe.init(["a"], batch(), None)
    state, second = trained(pipe, state, 1)
    alone = pipeline()
    assert first + second == trained(alone, alone.init(PARAMS[:3], batch(), None), 2)[1]


# What it refuses


def expect(message: str, **kwargs: Any) -> Any:
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"microbatches": 3},
            "3 micro-batches do not divide the 8 examples .*nearest that do are 2 and 4",
        ),
        ({"stages": 7}, "7 stages need at least as many layers, but the model has 6"),
        ({"stages": 9}, "9 stages need 9 devices, there are 8"),
        ({"schedule": "1f1p"}, "unknown schedule '1f1p': did you mean '1f1b'"),
        (
            {"schedule": "2bw", "microbatches": 1},
            "2bw on 2 stages needs at least 2 micro-batches, but 1 is given",
        ),
        ({"planner": "evn"}, "unknown planner 'evn': did you mean 'even'"),
        ({"stages": 0}, "stages must be a whole number of at least 1, not 0"),
        ({"microbatches": True}, "microbatches must be a whole number of at least 1, not True"),
        ({"memory_limit": "lots"}, "memory limit 'lots' is not a size"),
        ({"host_memory_limit": "lots"}, "^host_memory_limit 'lots' is not a size"),
        ({"stages": jvpipe.Plan.from_cuts([3, 2])}, r"the plan lacks layers \[5\]"),
        (
            {"stages": jvpipe.Plan.from_cuts([3, 3], [0, 9])},
            "stage 1 is on device 9, but the devices here are 0 to 7",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(**kwargs).init(PARAMS, batch(), None)


def test_a_pipeline_needs_a_compiler() -> None:
    with (
        jax.disable_jit(),
        pytest.raises(ValueError, match=r"jax_disable_jit is True, .*: set it to False"),
    ):
        pipeline().init(PARAMS, batch(), None)


def test_losses_that_cannot_be_trained_are_refused() -> None:
    def refuse(loss: Any, message: str, params: Any = PARAMS) -> None:
        with pytest.raises(ValueError, match=message):
            pipeline(loss).init(params, batch(), None)

    refuse(lambda p, b, r: b["x"] @ p[0][0], r"the loss must be a scalar, not of shape \(2, 8\)")
    refuse(lambda p, b, r: jnp.mean(b["x"]), "depends on no parameter")
    refuse(
        lambda p, b, r: loss_fn(jax.tree.map(lambda x: x.astype(np.float32), p), b, r),
        "parameter '1/0' is of type int32",
        [PARAMS[0], (np.ones((D, D), np.int32), np.zeros(D))],
    )


def test_batches_that_cannot_be_cut_are_refused() -> None:
    pipe = pipeline()
    with pytest.raises(ValueError, match="batch leaf 'n' is a scalar"):
        pipe.init(PARAMS, batch() | {"n": np.float32(1)}, None)
    with pytest.raises(ValueError, match="differ in their leading axis"):
        pipe.init(PARAMS, batch() | {"y": batch(4)["y"]}, None)


def test_a_loss_that_is_not_finite_is_told_at_once_when_it_is_known_and_takes_no_state() -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, batch(), None)
    for bad in (0, 1, 2):
        for _ in range(bad):
            state, _ = pipe.step(state, batch())
        state, _ = pipe.step(state, {k: v * np.float32(np.nan) for k, v in batch().items()})
        with pytest.raises(
            ValueError,
            match=f"the loss of step {bad} is nan at stage 1, and parameter '0/0' is NaN",
        ):
            pipe.wait(state)
        assert np.isnan(pipe.params(state)[0][0]).any()  # it can be looked at still
        state = pipe.init(PARAMS, batch(), None)


def test_a_state_is_consumed_by_its_step() -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, batch(), None)
    trained(pipe, state, 1)
    for use in (
        lambda: pipe.step(state, batch()),
        lambda: pipe.params(state),
        lambda: pipe.evaluate(state, batch()),
    ):
        with pytest.raises(ValueError, match="consumed by an earlier step"):
            use()


def test_nothing_works_before_init() -> None:
    pipe = pipeline()
    state = jvpipe.State((), None, 0)
    for use in (lambda: pipe.step(state, batch()), lambda: pipe.plan, lambda: pipe.explain()):
        with pytest.raises(ValueError, match="call init or restore first"):
            use()


def test_an_optimizer_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="scale_by_lbfgs"):
        pipeline(optimizer=optax.lbfgs(linesearch=None)).init(PARAMS, batch(), None)
    with pytest.raises(ValueError, match="scale_by_zoom_linesearch"):
        pipeline(optimizer=optax.lbfgs()).init(PARAMS, batch(), None)


def in_batch_loss(params: Any, batch: Any, rng: Any) -> jax.Array:
    """A contrastive loss: the other examples of the batch are the negatives of each."""
    x = batch["x"]
    for w, b in params:
        x = jnp.tanh(x @ w + b[None, :])
    logits = x @ batch["y"].T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


@pytest.mark.parametrize(
    ("loss", "options", "warns"),
    [
        (in_batch_loss, {"microbatches": None}, True),
        (in_batch_loss, {"microbatches": 4}, False),
        (loss_fn, {"microbatches": None}, False),
    ],
)
def test_a_batch_that_is_split_unasked_gives_a_warning_where_that_is_another_loss(
    loss: Any, options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline(loss, **options).init(PARAMS, batch(), None)
    warnings = [r.getMessage() for r in caplog.records if "microbatches=1" in r.getMessage()]
    assert len(warnings) == warns
    assert all("'dot_general'" in warning for warning in warnings)


def test_a_batch_of_another_shape_is_traced_again(caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipeline()
    state = pipe.init(PARAMS, batch(), None)
    for size in (16, 8, 16):
        state, _ = pipe.step(state, batch(size))
    state, metrics = pipe.step(state, batch())
    assert np.isfinite(float(metrics["loss"]))
    assert [r.message for r in caplog.records] == [
        "the shapes of the batch changed: tracing and compiling for them"
    ]


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    pipe = pipeline()
    pipe.save(tmp_path / "saved", pipe.init(PARAMS, batch(), None))
    wider = [
        (np.ones((D, D + 1), np.float32), np.zeros(D + 1, np.float32)),
        (np.ones((D + 1, D), np.float32), PARAMS[0][1]),
    ]
    for params, message in (
        (PARAMS[:5], "this one has no parameter '5/0'"),
        ([*PARAMS, PARAMS[0]], "it has no parameter '6/0'"),
        (
            [*wider, *PARAMS[2:]],
            r"its parameter '0/0' is float32\[8, 8\], this model's is float32\[8, 9\]",
        ),
    ):
        other = pipeline()
        other.init(params, batch(), None)
        with pytest.raises(ValueError, match=message):
            other.restore(tmp_path / "saved")
    other = pipeline(optimizer=optax.sgd(1e-2, momentum=0.9))
    other.init(PARAMS, batch(), None)
    with pytest.raises(
        ValueError,
        match="of another optimizer: it has no array of the optimizer's state '0/trace/0/0'",
    ):
        other.restore(tmp_path / "saved")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        pipe.restore(tmp_path)


def test_a_stage_that_raises_is_named() -> None:
    fail = False

    def check(x: np.ndarray) -> np.ndarray:
        if fail:
            raise RuntimeError("no such luck")
        return x

    def loss(params: Any, b: Any, rng: Any) -> jax.Array:
        x = b["x"]
        for i, (w, bias) in enumerate(params):
            x = jnp.tanh(x @ w + bias[None, :])
            if i == 4:
                seen = jax.pure_callback(
                    check, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x)
                )
                x = x + 0 * jax.lax.stop_gradient(seen)
        return jnp.mean((x - b["y"]) ** 2)

    pipe = pipeline(loss, stages=3)
    state = pipe.init(PARAMS, batch(), None)
    state, metrics = pipe.step(state, batch())
    float(metrics["loss"])
    fail = True
    with pytest.raises(
        jvpipe.StageError,
        match=r"stage 2, task 2F0\[layer 4\].*failed: .*RuntimeError: no such luck",
    ):
        pipe.wait(pipe.step(state, batch())[0])


# What it is made of

CONTRACT = (
    "init step evaluate predict run params plan explain migrate needs update_model save restore "
    "ledger model_state optimizer_state with_optimizer_state drain adapt precompile wait session"
)
ROOT = Path(__file__).parents[1]


def test_the_facade_has_the_members_of_the_contract_and_no_others() -> None:
    assert {name for name in dir(pipeline()) if not name.startswith("_")} == set(CONTRACT.split())


def private_members() -> set[str]:
    """The names that the facade, the session and what hangs from it keep to themselves."""
    rooms = [ROOT / "jvpipe/session", ROOT / "jvpipe/runtime"]
    files = [ROOT / "jvpipe/pipeline.py", *(file for room in rooms for file in room.rglob("*.py"))]
    return {name for file in files for name in re.findall(r"self\.(_[a-z]\w*)", file.read_text())}


def reaches(source: str, names: set[str]) -> list[str]:
    """The private members that a text takes of another object than its own, in code or in a name to
    monkeypatch.
    """
    return re.findall(rf"(?<!self)(?<!cls)\.(?:{'|'.join(sorted(names))})\b", source)


def test_a_reach_for_a_private_member_is_seen() -> None:
    name = "_x"
    source = f"pipe.session.{name}\nself.{name}\nrow._replace(a=1)\nsetattr('jvpipe.session.adapt.{name}', 0)"
    assert reaches(source, {name, "_y"}) == [f".{name}", f".{name}"]


def test_tests_and_experiments_take_no_private_member_of_the_facade_or_the_session() -> None:
    names = private_members()
    files = [file for folder in ("tests", "experiments") for file in (ROOT / folder).rglob("*.py")]
    assert len(names) > 50
    assert len(files) > 100
    assert not {
        f"{file.relative_to(ROOT)}: {reach}"
        for file in files
        for reach in reaches(file.read_text(), names)
    }
