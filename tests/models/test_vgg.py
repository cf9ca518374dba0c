"""Shapes after table 1 of arXiv:1409.1556, and the loss of an image written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.models import load
from tests.models.plain_images import class_nats, fake_images, shaken, windows

COLUMNS = {  # D and E
    "16": "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M",
    "19": "64 64 M 128 128 M 256 256 256 256 M 512 512 512 512 M 512 512 512 512 M",
}
COUNTS = {"16": 138_357_544, "19": 143_667_240}


@pytest.mark.parametrize("size", COLUMNS)
def test_shapes_are_those_of_the_papers_columns(size: str) -> None:
    params = jax.eval_shape(load("vgg", size).init, jax.eval_shape(lambda: jax.random.key(0)))
    kernels, width, side = [], 3, 224
    for entry in COLUMNS[size].split():
        if entry == "M":
            side //= 2
            continue
        kernels.append((3, 3, width, int(entry)))
        width = int(entry)
    kernels += [(side * side * width, 4096), (4096, 4096), (4096, 1000)]
    leaves = jax.tree.leaves(params)
    assert sorted(leaf.shape for leaf in leaves if leaf.ndim > 1) == sorted(kernels)
    assert sum(leaf.size for leaf in leaves) == COUNTS[size]


def test_loss_is_that_of_a_plain_reference() -> None:
    workload, batch = load("vgg", "tiny"), fake_images()
    params = shaken(jax.eval_shape(workload.init, jax.random.key(0)))
    wide, x = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params), batch["images"]
    for group in ("0", "1"):
        for i in ("0", "1"):
            p = wide["groups"][group][i]
            x = np.maximum(
                np.einsum("hwbyxc,hwcd->byxd", windows(x, 3, 1, 0), p["kernel"]) + p["bias"], 0
            )
        x = x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))
    x = x.reshape(len(x), -1)
    for i in ("0", "1", "2"):
        x = (np.maximum(x, 0) if i > "0" else x) @ wide["maps"][i]["kernel"] + wide["maps"][i][
            "bias"
        ]
    loss, aux = jax.jit(workload.loss_fn)(params, batch, None)
    np.testing.assert_allclose(loss.total, class_nats(x, batch), rtol=1e-4)
    assert aux["top_1"].total == ((x.argmax(1) == batch["targets"]) * batch["weights"]).sum()


def test_dropout_is_of_the_key() -> None:
    workload, batch = load("vgg", "tiny", dropout=0.5, units=64), fake_images()
    params, loss = (
        shaken(jax.eval_shape(workload.init, jax.random.key(0))),
        jax.jit(workload.loss_fn),
    )
    found = [
        float(loss(params, batch, key)[0].total)
        for key in (jax.random.key(0), jax.random.key(1), None)
    ]
    assert len(set(found)) == 3


def test_bfloat16_is_computed_with_and_parameters_are_float32() -> None:
    workload = load("vgg", "tiny", dtype="bfloat16")
    params = jax.eval_shape(workload.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(workload.loss_fn)(params, workload.abstract_batch(2), None)
    products = [
        e.outvars[0].aval.dtype
        for e in jaxpr.eqns
        if e.primitive.name in ("conv_general_dilated", "dot_general")
    ]
    assert set(products) == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in (*jax.tree.leaves(params), *jaxpr.out_avals)} == {
        jnp.dtype("float32")
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 11}, "depth=11 must be one of 7, 9, 16, 19"),
        ({"side": 20}, "side=20 is halved 3 times: give a multiple of 8"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ({"units": 0}, "filters=16 and units=0 must be at least 1"),
    ],
)
def test_what_load_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("vgg", **arguments)
