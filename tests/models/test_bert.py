from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe.models import load
from jvpipe.models.workload import Batch, Workload
from tests.models.plain import gelu, linear, norm, shaken

SHAPE = {"blocks": 1, "width": 16, "heads": 2, "vocabulary": 300, "tokens": 8, "mask_rate": 0.4}
KEY = jax.random.key(7)


def tiny(**options: object) -> Workload:
    return load("bert", "mini", **{**SHAPE, **options})


def fake_batch(workload: Workload, size: int = 3, seed: int = 0) -> Batch:
    rng, config = np.random.default_rng(seed), workload.config
    positions = np.stack(
        [rng.choice(config.tokens, config.masked, replace=False) for _ in range(size)]
    )
    return {
        "tokens": rng.integers(5, config.vocabulary, (size, config.tokens)).astype(np.int32),
        "positions": positions.astype(np.int32),
        "targets": rng.integers(5, config.vocabulary, (size, config.masked)).astype(np.int32),
        "weights": rng.integers(0, 2, (size, config.masked)).astype(np.float32),
    }


def plain_loss(
    params: dict, lookup: np.ndarray, projection: np.ndarray, batch: Batch
) -> tuple[float, float]:
    """One block, two heads, written out token by token; the two uses of the embedding apart."""
    p, total, weight = params["blocks"]["000"], 0.0, 0.0
    for b, tokens in enumerate(batch["tokens"]):
        xs = [norm(lookup[t], params["embeddings"]["norm"]) for t in tokens]
        qkv = [linear(norm(x, p["attention_norm"]), p["attention"]["inputs"]) for x in xs]
        mixed = []
        for i in range(len(xs)):
            heads = []
            for h in range(2):
                q, k, v = (slice(16 * part + 8 * h, 16 * part + 8 * h + 8) for part in range(3))
                away = [(i - j if h == 0 else j - i) for j in range(len(xs))]
                bias = [-d if d >= 0 else 4 * d for d in away]
                powers = [np.exp(qkv[i][q] @ qkv[j][k] / 8**0.5 + bias[j]) for j in range(len(xs))]
                heads.append(sum(e * qkv[j][v] for j, e in enumerate(powers)) / sum(powers))
            mixed.append(np.concatenate(heads))
        xs = [x + linear(y, p["attention"]["output"]) for x, y in zip(xs, mixed, strict=True)]
        xs = [
            x + linear(gelu(linear(norm(x, p["feed_forward_norm"]), p["expand"])), p["contract"])
            for x in xs
        ]
        head = params["head"]
        for position, target, w in zip(
            *(batch[n][b] for n in ("positions", "targets", "weights")), strict=True
        ):
            y = norm(
                gelu(linear(norm(xs[position], head["input_norm"]), head["transform"])),
                head["norm"],
            )
            logits = projection @ y + head["bias"]
            total += float(w * (np.log(np.exp(logits).sum()) - logits[target]))
            weight += float(w)
    return total, weight


def test_loss_is_that_of_a_plain_reference() -> None:
    workload = tiny()
    params, batch = shaken(workload), fake_batch(workload)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    embedding = wide["embeddings"]["tokens"]["embedding"]
    total, weight = plain_loss(wide, embedding, embedding, batch)
    loss = jax.jit(workload.loss_fn)(params, batch, KEY)
    np.testing.assert_allclose(loss.total, total, rtol=1e-5)
    assert loss.weight == weight > 0


def test_tied_embedding_has_the_gradients_of_both_uses() -> None:
    workload = tiny()
    params, batch = shaken(workload), fake_batch(workload)
    gradient: Any = jax.jit(jax.grad(lambda p: workload.loss_fn(p, batch, KEY).total))(params)
    tied = gradient["embeddings"]["tokens"]["embedding"]
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    embedding = wide["embeddings"]["tokens"]["embedding"]
    along, h = np.random.default_rng(2).normal(size=embedding.shape), 1e-5

    def slope(lookup: float, projection: float) -> float:
        """The loss's derivative along `along` where the lookup and the projection move at these
        speeds.
        """
        ends = (
            plain_loss(
                wide, embedding + s * lookup * along, embedding + s * projection * along, batch
            )[0]
            for s in (h, -h)
        )
        return (next(ends) - next(ends)) / (2 * h)

    assert abs(slope(1, 0)) > 0.1
    assert abs(slope(0, 1)) > 0.1
    np.testing.assert_allclose(np.vdot(np.asarray(tied, np.float64), along), slope(1, 1), rtol=1e-4)


def test_a_batch_in_parts_adds_up() -> None:
    workload = tiny(blocks=2)
    params, batch = shaken(workload), fake_batch(workload, size=4)
    loss_fn = jax.jit(workload.loss_fn)
    whole = loss_fn(params, batch, KEY)
    parts = [loss_fn(params, {k: v[i : i + 1] for k, v in batch.items()}, KEY) for i in range(4)]
    np.testing.assert_allclose(sum(part.total for part in parts), whole.total, rtol=1e-5)
    assert sum(part.weight for part in parts) == whole.weight


def test_dropout_follows_from_the_key_alone() -> None:
    workload = tiny(blocks=2, dropout=0.3)
    params, batch = shaken(workload), fake_batch(workload)
    loss = jax.jit(workload.loss_fn)
    first, again, other = (loss(params, batch, jax.random.key(seed)).total for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert abs(float(first - other)) > 1e-2
    traced_anew = jax.jit(lambda *arguments: workload.loss_fn(*arguments).total)(params, batch, KEY)
    np.testing.assert_array_equal(first, traced_anew)


def test_no_key_means_no_dropout() -> None:
    dropping, plain = tiny(dropout=0.3), tiny()
    params, batch = shaken(plain), fake_batch(plain)
    without, never = (
        jax.jit(dropping.loss_fn)(params, batch, None),
        jax.jit(plain.loss_fn)(params, batch, KEY),
    )
    np.testing.assert_array_equal(without.total, never.total)


def test_dropout_differs_from_block_to_block() -> None:
    workload = tiny(blocks=3, dropout=0.3)
    jaxpr = jax.make_jaxpr(workload.loss_fn)(shaken(workload), fake_batch(workload), KEY)
    folded = [int(e.invars[1].val) for e in jaxpr.eqns if e.primitive.name == "random_fold_in"]
    assert folded == [0, 1, 2, 3]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_trace_alike_and_capture_nothing(dropout: float) -> None:
    def traced(blocks: int) -> list[str]:
        workload = tiny(blocks=blocks, dropout=dropout)
        params = jax.eval_shape(workload.init, KEY)
        jaxpr = jax.make_jaxpr(workload.loss_fn)(params, workload.abstract_batch(2), KEY)
        assert not jaxpr.consts
        return [f"{e.primitive} {[v.aval for v in e.outvars]}" for e in jaxpr.eqns]

    one, two, three = traced(1), traced(2), traced(3)
    block = len(two) - len(one)
    start = next(i for i, (a, b) in enumerate(zip(two, three, strict=False)) if a != b) - 2 * block
    assert len(three) == len(one) + 2 * block
    assert three[start : start + block] == three[start + block : start + 2 * block]
    assert three[start : start + block] == three[start + 2 * block : start + 3 * block]


@pytest.mark.thorough
def test_bfloat16_computes_near_float32_and_keeps_float32_parameters() -> None:
    workload, exact = tiny(dtype="bfloat16"), tiny()
    params, batch = shaken(workload), fake_batch(workload)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: workload.loss_fn(p, batch, KEY).total))(
        params
    )
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves((params, gradient))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, jax.jit(exact.loss_fn)(params, batch, KEY).total, rtol=2e-2)
    assert "bf16" in str(jax.make_jaxpr(workload.loss_fn)(params, batch, KEY))


def test_only_a_published_model_may_be_untied() -> None:
    assert not tiny(tied=False, published=True).config.tied
    with pytest.raises(ValueError, match="tied=False needs published=True: give both, or neither"):
        tiny(tied=False)


def test_large_is_planned_without_its_parameters() -> None:
    workload = load("bert", "large")
    params = jax.eval_shape(workload.init, KEY)
    V, D, L = 30522, 1024, 24
    block = 12 * D * D + 13 * D
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(params))
        == V * D + 2 * D + L * block + (D * D + 5 * D) + V
    )
    loss = jax.eval_shape(workload.loss_fn, params, workload.abstract_batch(4), KEY)
    assert loss.total.shape == loss.weight.shape == ()


@pytest.mark.thorough
def test_it_learns_a_batch_by_heart() -> None:
    workload = tiny(blocks=2, width=32)
    params, batch = jax.jit(workload.init)(KEY), fake_batch(workload, size=8)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def mean(p: dict) -> jax.Array:
            loss = workload.loss_fn(p, batch, KEY)
            return loss.total / loss.weight

        loss, gradient = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = jax.jit(optimizer.init)(params), []
    for _ in range(60):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert abs(losses[0] - np.log(300)) < 0.5
    assert losses[-1] < 0.2 * losses[0]
