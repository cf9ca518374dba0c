"""What batch norms remember changes once a batch: as the whole batch at once would change it,
wherever it is found.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe

Tree = Any
WIDTH, MICRO = 5, 4
RNG = np.random.default_rng(0)
BATCH = RNG.normal(3.0, 2.0, size=(16, 3, WIDTH)).astype(np.float32)
PARAMS = [RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(2)]
STATE = {"mean": np.zeros(WIDTH, np.float32), "variance": np.ones(WIDTH, np.float32)}
Rule = Callable[[Tree, jax.Array], tuple[Tree, jax.Array, jax.Array]]


@pytest.fixture(autouse=True)
def operands_are_promoted() -> Iterator[None]:
    """As users write a mean of features beside many rows of them, and Linen what it casts."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def plain(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    """As most write it."""
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    state = {
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "variance": 0.9 * state["variance"] + 0.1 * variance,
    }
    return state, mean, variance


def by_difference(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    """Moved towards the statistics, the variance without bias, as PyTorch's."""
    mean, variance = x.mean((0, 1)), ((x - x.mean((0, 1))) ** 2).mean((0, 1))
    free = jnp.var(x, (0, 1), ddof=1)
    moved = lambda old, new: old + 0.1 * (new - old)  # noqa: E731
    state = {"mean": moved(state["mean"], mean), "variance": moved(state["variance"], free)}
    return state, mean, variance


def of_squares(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    """In one go, in two jits, and the deviation in place of the variance."""
    mean = jax.jit(lambda x: x.mean((0, 1)))(x)
    variance = jax.jit(lambda x: (x * x).mean((0, 1)))(x) - mean**2
    state = {
        "mean": 0.5 * (state["mean"] + mean),
        "variance": 0.5 * (state["variance"] + jnp.sqrt(variance)),
    }
    return state, mean, variance


def loss_of(rule: Rule) -> Callable[..., Any]:
    def loss_fn(params: Tree, state: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        x = batch @ params[0]
        state, mean, variance = rule(state, x)
        y = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
        return jnp.mean((jnp.tanh(y) @ params[1]) ** 2), state

    return loss_fn


def pipeline(loss_fn: Any, **options: Any) -> jvpipe.Pipeline:
    options = {"stages": 2, "planner": "even", "deferred_batch_norm": True} | options
    return jvpipe.Pipeline(loss_fn, optax.sgd(0.0), microbatches=MICRO, has_state=True, **options)


def remembered(loss_fn: Any, params: Tree, batch: Tree, state: Tree, **options: Any) -> Tree:
    """The model state after two batches."""
    pipe = pipeline(loss_fn, **options)
    now = pipe.init(params, batch, jax.random.key(0), state)
    for _ in range(2):
        now, _ = pipe.step(now, batch)
    return pipe.model_state(now)


def close(ours: Tree, theirs: Tree) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [plain, by_difference, of_squares])
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always", "schedule": "gpipe"}])
def test_own_code_remembers_whole_batches(rule: Rule, options: Any) -> None:
    loss_fn, state = loss_of(rule), STATE
    for _ in range(2):
        _, state = loss_fn(PARAMS, state, BATCH, None)
    close(remembered(loss_fn, PARAMS, BATCH, STATE, **options), state)


def test_batches_far_from_zero_keep_their_variance() -> None:
    far = 1e3 + BATCH / 100
    loss_fn = loss_of(plain)
    wide = [np.eye(WIDTH, dtype=np.float32)] * 2
    state = {"mean": np.full(WIDTH, 1e3, np.float32), "variance": np.zeros(WIDTH, np.float32)}
    ours = remembered(loss_fn, wide, far, state)
    true = 0.19 * far.astype(np.float64).var((0, 1))
    np.testing.assert_allclose(ours["variance"], true, rtol=0.02)


def test_deep_norms_remember_what_the_declared_ones_do() -> None:
    def found(params: Tree, state: Tree, x: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        after = []
        for w, old in zip(params, state, strict=True):
            new, mean, variance = plain(old, x @ w)
            after.append(new)
            x = jnp.tanh((x @ w - mean) * jax.lax.rsqrt(variance + 1e-5))
        return jnp.mean(x**2), after

    def declared(params: Tree, state: Tree, x: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        after = []
        for w, old in zip(params, state, strict=True):
            x, new = jvpipe.deferred_batch_norm(x @ w, old, MICRO)
            after.append(new)
            x = jnp.tanh(x)
        return jnp.mean(x**2), after

    ours = remembered(found, PARAMS, BATCH, [STATE] * 2)
    theirs = [jvpipe.BatchStatistics.of(WIDTH)] * 2
    theirs = remembered(declared, PARAMS, BATCH, theirs, deferred_batch_norm=False)
    close(ours, [{"mean": x.mean, "variance": x.variance} for x in theirs])


@pytest.mark.parametrize("fast", [True, False])
def test_linen_s_batch_norm_is_found(fast: bool) -> None:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            """Normalizes features of bfloat16, whose statistics are of float32."""
            norm = nn.BatchNorm(False, momentum=0.9, use_fast_variance=fast, dtype=jnp.bfloat16)
            return nn.Dense(3)(norm(nn.Dense(7)(x)))

    net = Net()
    variables = net.init(jax.random.key(0), BATCH)

    def loss_fn(params: Tree, state: Tree, x: Any, rng: Any) -> tuple[jax.Array, Tree]:
        y, after = net.apply({"params": params, **state}, x, mutable=["batch_stats"])
        return jnp.mean(y.astype(jnp.float32) ** 2), after

    params = variables["params"]
    begun = state = {"batch_stats": variables["batch_stats"]}
    for _ in range(2):
        _, state = loss_fn(params, state, BATCH, None)
    close(remembered(loss_fn, params, BATCH, begun), state)


def test_nnx_s_batch_norm_is_found() -> None:
    nnx = pytest.importorskip("flax.nnx")
    from jvpipe.nnx import loss

    def build(rngs: Any) -> Any:
        layers = nnx.Linear(WIDTH, 7, rngs=rngs), nnx.BatchNorm(7, rngs=rngs)
        return nnx.Sequential(*layers, nnx.Dropout(0.5, rngs=rngs), nnx.Linear(7, 3, rngs=rngs))

    made_loss = loss(build, lambda module, x: jnp.mean(module(x) ** 2))
    key = jax.random.key(0)
    params, begun = made_loss.init(key), made_loss.model_state(key)
    state = begun
    for _ in range(2):
        _, state = made_loss(params, state, BATCH, key)
    close(remembered(made_loss, params, BATCH, begun), state)


def test_losses_and_evaluations_are_as_without(tmp_path: Any) -> None:
    """And a checkpoint at rest goes on bitwise."""
    loss_fn = loss_of(plain)
    losses = []
    for deferred in (False, True):
        pipe = pipeline(loss_fn, deferred_batch_norm=deferred)
        state = pipe.init(PARAMS, BATCH, None, STATE)
        before = float(pipe.evaluate(state, BATCH)["loss"])
        state, metrics = pipe.step(state, BATCH)
        losses.append((before, float(metrics["loss"])))
        pipe.save(tmp_path / str(deferred), state)
        saved = pipe.model_state(state)
        again = pipe.restore(tmp_path / str(deferred))
        assert all(map(np.array_equal, saved.values(), pipe.model_state(again).values()))
        pipe.step(again, BATCH)
    assert losses[0] == losses[1]


def test_another_model_goes_on_with_what_was_remembered() -> None:
    pipe = pipeline(loss_of(plain))
    state, _ = pipe.step(pipe.init(PARAMS, BATCH, None, STATE), BATCH)
    before = pipe.model_state(state)
    state = pipe.update_model(state, loss_of(of_squares), PARAMS)
    after = pipe.model_state(state)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    _, wanted = loss_of(of_squares)(PARAMS, before, BATCH, None)
    state, _ = pipe.step(state, BATCH)
    close(pipe.model_state(state), wanted)


def with_largest(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    _, mean, variance = plain(state, x)
    return {**state, "mean": 0.9 * state["mean"] + 0.1 * x.max((0, 1)) + mean}, mean, variance


def masked(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    new, mean, variance = plain(state, x)
    wide = jnp.sum(jnp.where(x > 0, (x - mean) ** 2, 0.0), (0, 1))
    return {**new, "variance": state["variance"] + variance + wide}, mean, variance


def crossed(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    _, mean, variance = plain(state, x)
    return {"mean": state["variance"] + mean, "variance": state["mean"]}, mean, variance


def untouched(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
    return {"mean": state["mean"] + 1, "variance": x.max((0, 1))}, x.mean((0, 1)), x.var((0, 1))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (with_largest, "'mean' .* also of single examples through reduce_max"),
        (masked, "'variance' .* also of sums over examples other than those of values and of"),
        (crossed, "'mean' .* also of parameters, or of other leaves of the model state"),
        (
            untouched,
            "'mean' is not made of sums over examples; 'variance' depends .* through reduce_max",
        ),
    ],
)
def test_what_cannot_be_put_off_is_refused_with_the_reason(rule: Rule, why: str) -> None:
    with pytest.raises(ValueError, match=f"deferred_batch_norm=True.*{why}"):
        pipeline(loss_of(rule)).init(PARAMS, BATCH, None, STATE)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"has_state": False}, "carries no model state: say has_state=True"),
        ({"schedule": "pipedream"}, "needs a schedule that ends each batch"),
        ({"replicas": (2, 1)}, r"with replicas=\(2, 1\)"),
        ({"replicas": "auto", "stages": None, "planner": "jvpipe"}, "with replicas='auto'"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options: Any, why: str) -> None:
    has_state = {"has_state": True} | options
    chosen = {"stages": 2, "planner": "even"} | has_state
    loss_fn = loss_of(plain) if has_state["has_state"] else lambda params, batch, rng: 0.0
    with pytest.raises(ValueError, match=why):
        jvpipe.Pipeline(loss_fn, optax.sgd(0.1), deferred_batch_norm=True, **chosen)
