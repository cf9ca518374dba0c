"""What a loss returns beside its value is made of micro-batches and replicas as is said: plain JAX
is the oracle.
"""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from tests.grid import grid

Tree = Any
MICRO, EXAMPLES, D, STEPS = 2, 6, 3, 2
DRAW = np.random.default_rng(4)
PARAMS = [DRAW.normal(size=(D, D)).astype(np.float32) for _ in range(3)]
ROWS = DRAW.normal(size=(MICRO * EXAMPLES, D)).astype(np.float32)
WIDTHS = [(2, 1), (2, 2), (3, 2)]


def forward(params: Tree, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def with_aux(params: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
    y = forward(params, batch)
    aux = {
        "largest": y.max(),
        "row": y.max(0),
        "any": (y > 0.9).any(),
        "mean": y.mean(),
        "seen": batch.shape[0] + jnp.zeros((), jnp.int32),
        "above": jnp.sum(y > 0),
        "one": jnp.maximum(jnp.sum(y > 9), 1),  # none is; a slice has this bound too
        "rounded": jnp.round(100 * y.mean()).astype(jnp.int32),
        "last": batch[:, 0].max(),
        "gram": y.T @ y,
        "each": y[:, 0],
    }
    return jnp.mean(y**2), aux


REDUCE = {
    "largest": "max",
    "row": "max",
    "any": "max",
    "seen": "sum",
    "one": "max",
    "ab*": "sum",
    "rounded": "last",
    "last": "last",
    "gram": "mean",
}
SURE = {name: how for name, how in REDUCE.items() if name not in ("rounded", "last")}
"""Without what no reduction over slices makes."""


def made(values: list[Any], how: str | None) -> Any:
    match how:
        case None:
            return np.stack(values)
        case "mean":
            return sum(values) / len(values)
        case "sum":
            return sum(values)
        case "max":
            return np.max(np.stack(values), 0)
        case "last":
            return values[-1]


def begun(
    loss: Callable[..., Any], widths: tuple[int, ...] | None = None, **options: Any
) -> jvpipe.Pipeline:
    options = {"planner": "even", "microbatches": MICRO, "replicas": widths} | options
    return jvpipe.Pipeline(loss, optax.sgd(0.5), len(widths or (1, 1)), **options)


@pytest.mark.parametrize(
    "widths",
    [None, (3, 2), *(pytest.param(w, marks=pytest.mark.thorough) for w in WIDTHS[:2])],
)
def test_aux_is_reduced_as_the_user_says(widths: tuple[int, ...] | None) -> None:
    kept = set(REDUCE if widths is None else SURE) | {"above", "mean", "each"}

    def loss(params: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        value, aux = with_aux(params, batch, rng)
        return value, {name: leaf for name, leaf in aux.items() if name in kept}

    pipe = begun(
        loss,
        widths,
        has_aux=True,
        aux_reduce={k: v for k, v in REDUCE.items() if k in kept or "*" in k},
    )
    state = pipe.init(PARAMS, ROWS, None)
    wanted = [jax.jit(with_aux)(PARAMS, part, None)[1] for part in np.split(ROWS, MICRO)]
    how = REDUCE | {"above": "sum", "mean": "mean", "each": None}
    evaluated = pipe.evaluate(state, ROWS)["aux"]
    _, metrics = pipe.step(state, ROWS)
    for found in (metrics["aux"], evaluated):
        assert set(found) == kept - {"ab*"}
        for name, leaf in found.items():
            expected = np.asarray(made([np.asarray(aux[name]) for aux in wanted], how[name]))
            np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-6, err_msg=name)
            assert name == "above" or leaf.dtype == expected.dtype


def test_aux_that_slices_do_not_make_is_refused_with_the_option() -> None:
    for name in ("largest", "row", "any", "rounded", "last"):

        def loss(
            params: Tree, batch: jax.Array, rng: Any, name: str = name
        ) -> tuple[jax.Array, Tree]:
            value, aux = with_aux(params, batch, rng)
            return value, {name: aux[name]}

        with pytest.raises(
            ValueError, match=rf"leaf \['{name}'\] of aux .* aux_reduce={{'{name}': 'max'}}"
        ):
            begun(loss, (2, 1), has_aux=True).init(PARAMS, ROWS, None)


def test_aux_is_the_same_for_every_cut_and_schedule() -> None:
    reduce = {"largest": "max", "seen": "sum", "above": "sum", "gram": "sum", "last": "last"}

    def run(stages: int, schedule: str) -> Mapping[str, Any]:
        pipe = jvpipe.Pipeline(
            with_aux,
            optax.sgd(0.5),
            stages,
            4,
            schedule,
            planner="even",
            has_aux=True,
            aux_reduce=reduce,
        )
        return pipe.step(pipe.init(PARAMS, ROWS, None), ROWS)[1]["aux"]

    first = run(1, "1f1b")
    for other in (run(3, "gpipe"), run(2, "zb-h1")):
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"aux_reduce": {"largest": "min"}},
            "aux_reduce has 'min' for 'largest': use one of 'mean', 'sum', 'max'",
        ),
        ({"aux_reduce": {"\u00e9\n": "max"}}, r"aux_reduce pattern '\u00e9\\n' matches no leaf"),
        ({"aux_reduce": {"\u00e9\n": "min"}}, r"aux_reduce has 'min' for '\u00e9\\n': use one of"),
        ({"aux_reduce": "max"}, "aux_reduce must map paths to reductions, such as .* not 'max'"),
        ({"aux_reduce": {"largest": "max"}, "has_aux": False}, "say has_aux=True"),
        ({"model_state_reduce": {"a": "max"}}, "one of 'mean', 'sum', 'same'"),
        ({"model_state_reduce": {"a": "sum"}}, "say has_state=True"),
        (
            {"aux_reduce": {"smallest": "max"}},
            "aux_reduce pattern 'smallest' matches no leaf: there are 'above', ",
        ),
        (
            {"aux_reduce": {"above": "mean"}},
            "'above' of aux, which is of type int32: cast it to float32",
        ),
        ({"aux_reduce": {"any": "sum"}}, "'any' of aux, which is of type bool: cast it to int32"),
    ],
)
def test_what_reductions_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        begun(with_aux, None, **{"has_aux": True} | options).init(PARAMS, ROWS, None)


def test_a_weighted_leaf_has_its_own_reduction() -> None:
    def loss(params: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        return jnp.mean(forward(params, batch)), [jvpipe.Weighted(jnp.sum(batch), jnp.float32(2))]

    with pytest.raises(ValueError, match=r"leaf '0' of aux, which is jvpipe\.Weighted"):
        begun(loss, has_aux=True, aux_reduce={"*": "sum"}).init(PARAMS, ROWS, None)


# Model state under replicas: each loss is given the present state and returns the next


def hidden(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params[0])


def rest(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(forward(params[1:], x) ** 2)


def counter(params: Tree, s: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
    """Counters of examples, as floats and whole numbers, and of micro-batches; a sum and a mean; a
    key that moves on.
    """
    y = hidden(params, batch)
    new = {
        "seen": s["seen"] + batch.shape[0],
        "whole": s["whole"] + batch.shape[0],
        "above": s["above"] + jnp.sum(y > 0, 0),
        "steps": s["steps"] + 1,
        "both": 0.5 * s["both"] + jnp.sum(y, 0) + jnp.mean(y, 0),
        "key": jax.random.split(s["key"])[0],
    }
    return rest(params, y), new


def center(params: Tree, s: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
    """A moving mean that the loss reads."""
    y = hidden(params, batch)
    return rest(params, y - s[None]), 0.5 * s + 0.5 * jax.lax.stop_gradient(y.mean(0))


def codebook(params: Tree, s: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
    """Moving averages of how often each code is the nearest and of what is near it, as VQ-VAE has
    them.
    """
    y = hidden(params, batch)
    codes = s["sum"] / s["count"][:, None]
    near = jax.nn.one_hot(
        jnp.argmin(jnp.sum((y[:, None] - codes[None]) ** 2, -1), -1), 4, dtype=jnp.float32
    )
    new = {
        "count": 0.7 * s["count"] + 0.3 * jnp.sum(near, 0),
        "sum": 0.7 * s["sum"] + 0.3 * jax.lax.stop_gradient(jnp.einsum("nc,nd->cd", near, y)),
    }
    return rest(params, y + jax.lax.stop_gradient(near @ codes - y)) + jnp.mean(
        (y - near @ codes) ** 2
    ), new


def capped(params: Tree, s: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
    """What the trace cannot say: a counter with a limit, the largest so far, and the same on
    all.
    """
    y = hidden(params, batch)
    new = {
        "limited": jnp.minimum(s["limited"] + batch.shape[0], 100.0),
        "spread": s["spread"] + jnp.exp(jnp.mean(y)) * 0 + 2,
        "moving": 0.5 * s["moving"] + 0.5 * jnp.clip(jnp.mean(y, 0), -9.0, 9.0),
    }
    return rest(params, y), new


ZERO = np.float32(0)
CODES = DRAW.normal(size=(4, D)).astype(np.float32)
STATES: dict[str, tuple[Callable[..., Any], Tree, dict[str, str]]] = {
    "counter": (
        counter,
        {
            "seen": ZERO,
            "whole": np.int32(5),
            "above": np.zeros(D, np.int32),
            "steps": np.int32(0),
            "both": np.zeros(D, np.float32),
            "key": jax.random.key(2),
        },
        {},
    ),
    "center": (center, np.zeros(D, np.float32), {}),
    "codebook": (codebook, {"count": np.ones(4, np.float32), "sum": CODES}, {}),
    "capped": (
        capped,
        {"limited": ZERO, "spread": ZERO, "moving": np.zeros(D, np.float32)},
        {"limited": "sum", "s*": "same", "moving": "mean"},
    ),
}


def plainly(loss: Callable[..., Any], model_state: Tree) -> tuple[Tree, Tree, list[float]]:
    """Parameters, model state and losses of plain JAX on whole micro-batches."""
    params, losses = PARAMS, []
    pulled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for _ in range(STEPS):
        total, gradients = 0.0, []
        for part in np.split(ROWS, MICRO):
            (value, model_state), gradient = pulled(params, model_state, part, None)
            total, gradients = total + float(value) / MICRO, [*gradients, gradient]
        params = jax.tree.map(lambda p, *gs: p - 0.5 * sum(gs) / MICRO, params, *gradients)
        losses.append(total)
    return params, model_state, losses


def stepped(
    loss: Callable[..., Any], model_state: Tree, widths: Any, **options: Any
) -> tuple[Tree, Tree, list[float]]:
    pipe = begun(loss, widths, has_state=True, **options)
    state, losses = pipe.init(PARAMS, ROWS, None, model_state), []
    for _ in range(STEPS):
        state, metrics = pipe.step(state, ROWS)
        losses.append(float(metrics["loss"]))
    assert list(pipe.ledger.peak) == [peak.bytes for peak in pipe.session.compiled.peaks]
    return pipe.params(state), pipe.model_state(state), losses


def words(tree: Tree) -> Tree:
    """Keys as the numbers that they are."""
    is_key = lambda x: jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)


def close(found: Tree, wanted: Tree) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
        words(found),
        words(wanted),
    )


@pytest.mark.parametrize(
    ("name", "widths"),
    grid(
        list(product(STATES, WIDTHS)),
        *((name, WIDTHS[i % len(WIDTHS)]) for i, name in enumerate(STATES)),
    ),
)
def test_model_state_is_that_of_whole_micro_batches(name: str, widths: tuple[int, ...]) -> None:
    loss, model_state, said = STATES[name]
    found = stepped(loss, model_state, widths, model_state_reduce=said or None)
    close(found, plainly(loss, model_state))
    if name == "counter":
        assert found[1]["seen"] == STEPS * MICRO * EXAMPLES
        assert found[1]["whole"] == 5 + STEPS * MICRO * EXAMPLES


def test_state_has_the_same_bits_for_every_cut_and_schedule() -> None:
    loss, model_state, _ = STATES["codebook"]
    first = stepped(loss, model_state, (2,))
    for schedule in ("gpipe", "zb-h1"):
        other = stepped(loss, model_state, (2, 2), schedule=schedule)
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_state_that_the_trace_cannot_say_is_refused_with_the_option() -> None:
    loss, model_state, said = STATES["capped"]
    for left in ("limited", "spread", "moving"):
        others = dict(zip(("limited", "spread", "moving"), said.values(), strict=True))
        del others[left]
        with pytest.raises(
            ValueError, match=rf"model state '{left}' .* model_state_reduce={{'{left}': 'mean'}}"
        ):
            stepped(loss, model_state, (2, 1), model_state_reduce=others)


def test_what_the_user_says_of_state_must_fit_it() -> None:
    def loss(params: Tree, s: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        y = hidden(params, batch)
        return rest(params, y), {
            "n": jnp.maximum(s["n"], jnp.sum(y > 0)),
            "any": s["any"] | (y > 0.9).any(),
        }

    model_state = {"n": np.int32(0), "any": np.bool_(False)}
    for said, message in (
        (
            {"n": "mean", "any": "same"},
            "says 'mean' for 'n', which is of type int32: choose 'sum', 'same'",
        ),
        ({"n": "sum", "any": "sum"}, "says 'sum' for 'any', which is of type bool: choose 'same'"),
        ({"m": "sum"}, "model_state_reduce pattern 'm' matches no leaf: there are 'any', 'n'"),
    ):
        with pytest.raises(ValueError, match=message):
            stepped(loss, model_state, (2, 1), model_state_reduce=said)


def test_a_statistic_of_the_batch_that_the_loss_uses_is_refused() -> None:
    """What the state keeps of it makes no batch norm of it."""

    def centered(params: Tree, s: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        y = hidden(params, batch)
        return rest(params, y - y.mean(0)[None]), 0.5 * s + 0.5 * y.mean(0)

    def new_mean(params: Tree, s: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        y = hidden(params, batch)
        new = 0.5 * s + 0.5 * y.mean(0)
        return rest(params, y - new[None]), new

    def spread_out(params: Tree, s: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        y = hidden(params, batch)
        return rest(params, y) - jnp.mean((y - y.mean(0)[None]) ** 2), 0.5 * s + 0.5 * y.mean(0)

    for loss in (centered, new_mean, spread_out):
        with pytest.raises(
            ValueError, match=r"cannot be replicated|cannot be computed from .* slices"
        ):
            stepped(loss, np.zeros(D, np.float32), (2, 1))


def test_state_of_replicas_is_evaluated_recomputed_moved_and_saved(tmp_path: Path) -> None:
    loss, model_state, _ = STATES["codebook"]
    wanted = stepped(loss, model_state, (2, 2))
    jax.tree.map(
        np.testing.assert_array_equal,
        stepped(loss, model_state, (2, 2), checkpoint="always"),
        wanted,
    )
    pipe = begun(loss, (2, 2), has_state=True)
    state = pipe.init(PARAMS, ROWS, None, model_state)
    state, _ = pipe.step(state, ROWS)
    parts = [
        jax.jit(loss)(pipe.params(state), pipe.model_state(state), x, None)[0]
        for x in np.split(ROWS, MICRO)
    ]
    np.testing.assert_allclose(pipe.evaluate(state, ROWS)["loss"], np.mean(parts), rtol=1e-4)
    pipe.save(tmp_path / "there", state)
    layers = len(pipe.session.graph.layers)
    plan = jvpipe.Plan.from_cuts([1, layers - 1], devices=[3, (0, 1, 2)])
    moved, _ = pipe.step(pipe.migrate(state, plan), ROWS)
    close((pipe.params(moved), pipe.model_state(moved)), wanted[:2])
    other = begun(loss, (1, 3), has_state=True)
    other.init(PARAMS, ROWS, None, model_state)
    restored, _ = other.step(other.restore(tmp_path / "there"), ROWS)
    close((other.params(restored), other.model_state(restored)), wanted[:2])


def through_a_cast(params: Any, batch: Any, rng: Any) -> jvpipe.Weighted:
    """The items that have a weight are counted: that is not the sum of the weights."""
    weights = batch["weights"]
    count, weight = jnp.sum(weights.astype(bool)), jnp.sum(weights).astype(jnp.float32)
    mean = jnp.sum((batch["x"] @ params["w"]) ** 2) / count.astype(jnp.float32)
    return jvpipe.Weighted(mean * weight, weight)


def through_a_loop(params: Any, batch: Any, rng: Any) -> jvpipe.Weighted:
    """What leaves the loop is no quotient by the count."""
    count = jnp.sum(batch["mask"])
    mean = jnp.sum((batch["x"] @ params["w"]) ** 2) / count
    mean = jax.lax.fori_loop(0, 3, lambda i, value: jnp.tanh(value), mean)
    return jvpipe.Weighted(mean * count, count)


def through_a_branch(params: Any, batch: Any, rng: Any) -> jvpipe.Weighted:
    """Within the branch, the total has the number that the count has outside."""
    count, each = jnp.sum(batch["mask"]), (batch["x"] @ params["w"]) ** 2
    mean, total = jnp.sum(each) / count, jnp.sum(each * each)
    is_positive = params["w"][0, 0] > 0
    product = jax.lax.cond(is_positive, lambda a, b: a * b, lambda a, b: a * b, mean, total)
    return jvpipe.Weighted(product, count)


@pytest.mark.parametrize("loss_fn", [through_a_cast, through_a_loop, through_a_branch])
def test_a_quotient_is_not_taken_for_a_mean_that_it_is_not(loss_fn: Any) -> None:
    batch = {
        "x": np.ones((8, 4), np.float32),
        "weights": np.array([0, 1, 2, 3, 1, 0, 3, 2], np.int32),
        "mask": np.ones(8, np.float32),
    }
    params = {"w": np.eye(4, dtype=np.float32)}
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), 1, 1, replicas=(2,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"cannot be computed from .* slices"):
        pipe.init(params, batch, None)
