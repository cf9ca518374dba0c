import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.models.vision import ClassConfig, Convolution, Head, batch_norm, class_loss
from tests.zoo import quick_key


def test_averages_move_by_a_tenth_and_stand_in_without_training() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(3, 2, (4, 2, 2, 5)).astype(np.float32))
    p, before = {"scale": jnp.full(5, 2.0), "bias": jnp.ones(5)}, Convolution(3, 5).averages()
    y, after = batch_norm(p, before, x, training=True)
    np.testing.assert_allclose(np.mean(y, (0, 1, 2)), 1, atol=1e-5)
    np.testing.assert_allclose(np.std(y, (0, 1, 2)), 2, rtol=1e-4)
    np.testing.assert_allclose(after["mean"], 0.1 * np.mean(x, (0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(after["variance"], 0.9 + 0.1 * np.var(x, (0, 1, 2)), rtol=1e-5)
    y, same = batch_norm(p, before, x, training=False)
    np.testing.assert_allclose(y, 2 * np.asarray(x) / np.sqrt(1 + 1e-5) + 1, rtol=1e-5)
    assert same is before


def test_top_1_counts_by_weights() -> None:
    logits = jnp.asarray([[1.0, 2.0], [2.0, 1.0], [3.0, 1.0]])
    batch = {"targets": jnp.asarray([1, 1, 0]), "weights": jnp.asarray([1.0, 1.0, 0.0])}
    loss, aux = class_loss(logits, batch)
    assert (aux["top_1"].total, aux["top_1"].weight) == (1, 2)
    np.testing.assert_allclose(loss.total, 2 * np.log1p(np.e) - 1, rtol=1e-6)


def test_the_head_takes_means_of_what_is_positive() -> None:
    head = Head(2, 3)
    p, x = head.init(quick_key(0)), jnp.asarray([[[[1.0, -5.0]], [[3.0, 2.0]]]])
    np.testing.assert_allclose(head(p, x), jnp.asarray([[2.0, 1.0]]) @ p["kernel"], rtol=1e-6)
    assert jax.tree.map(jnp.shape, p) == {"kernel": (2, 3), "bias": (3,)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": 4}, "side=4 is too small"),
        ({"classes": 1}, "classes=1 is too small"),
        ({"dtype": "float16"}, "unknown dtype 'float16'"),
    ],
)
def test_what_a_configuration_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassConfig(**options)
