from typing import Any

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.models import load
from jvpipe.models.amoebanet import AmoebaNet, AmoebaNetConfig
from jvpipe.models.workload import Batch
from jvpipe.trace.model import trace_model
from tests.grid import grid
from tests.models.plain_images import fake_images, shaken
from tests.zoo import quick_key

TINY: AmoebaNetConfig = load("amoebanet", "tiny").config
KEY = quick_key(7)


class Plain:
    """The model written out in numpy: cells after the TensorFlow implementation, its operations by
    name.
    """

    def __init__(self, averages: Any = None) -> None:
        self.averages, self.path = averages, [""]

    def unit(
        self,
        p: Any,
        name: str,
        x: np.ndarray,
        stride: tuple[int, int] = (1, 1),
        shift: bool = False,
    ) -> Any:
        x, kernel = np.maximum(x, 0), p[name]["kernel"]
        if shift:
            moved, half = np.zeros_like(x), kernel.shape[3] // 2
            moved[:, :-1, :-1] = x[:, 1:, 1:]
            y = [
                self.conv(x, kernel[..., :half], stride),
                self.conv(moved, kernel[..., half:], stride),
            ]
            y = np.concatenate(y, 3)
        else:
            y = self.conv(x, kernel, stride)
        if self.averages is None:
            mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
        else:
            found = self.averages if name == "stem" else self.averages["cells"][self.cell_name]
            mean, variance = found[name]["mean"], found[name]["variance"]
        return (y - mean) / np.sqrt(variance + 1e-5) * p[name]["scale"] + p[name]["bias"]

    def windows(
        self, x: np.ndarray, size: tuple[int, int], stride: tuple[int, int], fill: float
    ) -> np.ndarray:
        """[size_y, size_x, B, Y, X, C]: what each output sees at each offset."""
        pads = [(0, 0)]
        for n, k, s in zip(x.shape[1:3], size, stride, strict=True):
            total = max((-(-n // s) - 1) * s + k - n, 0)
            pads.append((total // 2, total - total // 2))
        x = np.pad(x, [*pads, (0, 0)], constant_values=fill)
        views = np.lib.stride_tricks.sliding_window_view(x, size, (1, 2))[
            :, :: stride[0], :: stride[1]
        ]
        return views.transpose(4, 5, 0, 1, 2, 3)

    def conv(self, x: np.ndarray, kernel: np.ndarray, stride: tuple[int, int]) -> np.ndarray:
        size = (kernel.shape[0], kernel.shape[1])
        return np.einsum("hwbyxc,hwcd->byxd", self.windows(x, size, stride, 0), kernel)

    def max(self, x: np.ndarray, size: int, stride: int = 1) -> np.ndarray:
        return self.windows(x, (size, size), (stride, stride), -np.inf).max((0, 1))

    def mean3(self, x: np.ndarray) -> np.ndarray:
        return np.nanmean(self.windows(x, (3, 3), (1, 1), np.nan), (0, 1))

    def narrow(
        self, p: Any, name: str, x: np.ndarray, strides: list[tuple[int, int]]
    ) -> np.ndarray:
        for i, stride in enumerate(strides):
            x = self.unit(p, f"{name}_{i}", x, stride)
        return x

    def normal(self, p: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        flat = [(1, 1)] * 4
        h2 = self.unit(p, "0_left_conv_1x1_0", b) + self.max(b, 3)
        h3 = b + self.narrow(p, "1_right_conv_1x7_7x1", a, flat)
        h4 = self.unit(p, "2_left_conv_1x1_0", a) + self.narrow(p, "2_right_conv_1x7_7x1", a, flat)
        h5 = self.max(h2, 3) + h2
        h6 = self.mean3(b) + self.unit(p, "4_right_conv_1x1_0", h5)
        return np.concatenate([a, h3, h4, h6], 3)

    def reduction(self, p: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        h2 = self.max(a, 2, 2) + self.max(a, 3, 2)
        h3 = h2 + self.narrow(p, "1_right_conv_3x3", b, [(1, 1), (2, 2), (1, 1)])
        h4 = self.narrow(p, "2_left_conv_1x7_7x1", h2, [(1, 1)] * 4) + self.max(h2, 3)
        h5 = h3 + self.max(b, 2, 2)
        h6 = self.mean3(h2) + self.unit(p, "4_right_conv_1x1_0", h3)
        return np.concatenate([h4, h5, h6], 3)

    def loss(self, params: Any, batch: Batch) -> float:
        far = near = self.unit(params, "stem", batch["images"].astype(np.float64))
        for i, kind in enumerate(["normal", "reduction", "normal"]):
            self.cell_name = f"{i:03}"
            p = params["cells"][self.cell_name]
            a, b = self.unit(p, "near_0", near), far
            if "far_0" in p:
                large = kind == "normal"
                b = self.unit(p, "far_0", far, (2, 2) if large else (1, 1), shift=large)
            far, near = near, getattr(self, kind)(p, a, b)
        logits = (
            np.maximum(near, 0).mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]
        )
        nats = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), batch["targets"]]
        return float(nats @ batch["weights"])


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.mark.thorough
def test_loss_and_gradient_are_those_of_a_plain_reference() -> None:
    model, batch = AmoebaNet(TINY), fake_images()
    params = shaken(jax.eval_shape(model.init, KEY))
    averages = model.averages()
    slope = jax.jit(jax.value_and_grad(lambda p: model.loss_fn(p, averages, batch, KEY)[0].total))
    loss, gradient = slope(params)
    np.testing.assert_allclose(loss, Plain().loss(wide(params), batch), rtol=1e-4)
    along, h = shaken(jax.eval_shape(model.init, KEY)), 1e-6
    along = jax.tree.map(lambda leaf: np.roll(np.asarray(leaf, np.float64), 1), along)
    ends = [
        Plain().loss(jax.tree.map(lambda p, d, s=s: p + s * h * d, wide(params), along), batch)
        for s in (1, -1)
    ]
    expected = (ends[0] - ends[1]) / (2 * h)
    found = sum(
        jax.tree.leaves(
            jax.tree.map(lambda g, d: np.vdot(np.asarray(g, np.float64), d), gradient, along)
        )
    )
    assert abs(expected) > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_without_a_key_the_averages_are_used_and_stay() -> None:
    model, batch = AmoebaNet(TINY), fake_images()
    params, averages = (
        shaken(jax.eval_shape(model.init, KEY)),
        shaken(jax.eval_shape(model.averages)),
    )
    loss, after, _ = jax.jit(model.loss_fn)(params, averages, batch, None)
    np.testing.assert_allclose(
        loss.total, Plain(wide(averages)).loss(wide(params), batch), rtol=1e-4
    )
    jax.tree.map(np.testing.assert_array_equal, after, averages)


@pytest.mark.parametrize(
    ("size", "shape", "gpipe", "torchgpipe"),  # millions; both round
    grid(
        [
            smallest := ("82m", (18, 208), 82, 81.5),
            ("319m", (18, 416), 318, 319.0),
            ("543m", (18, 544), 542, 542.7),
            ("1.1b", (36, 544), 1050, 1060),
            ("1.8b", (72, 512), 1800, 1840),
        ],
        smallest,
    ),
)
def test_parameters_are_as_many_as_both_gpipes_say(
    size: str, shape: tuple[int, int], gpipe: float, torchgpipe: float
) -> None:
    cells, filters = shape
    assert load("amoebanet", size).config == AmoebaNetConfig(cells=cells, filters=filters)
    found = parameters(cells=cells, filters=filters)
    assert found == pytest.approx(torchgpipe * 1e6, rel=0.005)
    assert found == pytest.approx(gpipe * 1e6, rel=0.03)


def test_28m_are_dawnpipers_28_million() -> None:
    assert load("amoebanet", "28m").config == AmoebaNetConfig(cells=18, filters=120)
    assert parameters(cells=18, filters=120) == pytest.approx(28e6, rel=0.005)


def parameters(**shape: Any) -> int:
    params = jax.eval_shape(
        AmoebaNet(AmoebaNetConfig(**shape)).init, jax.eval_shape(lambda: jax.random.key(0))
    )
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_normal_cells_of_a_group_are_cut_and_traced_alike() -> None:
    workload = load("amoebanet", "tiny", cells=6, groups=1)
    params = jax.eval_shape(workload.init, KEY)
    state, batch = workload.initial_state(), workload.abstract_batch(2)
    traced = trace_model(
        workload.loss_fn, params, batch, KEY, state, has_aux=True, has_state=True
    ).traced
    layers: dict[str, list[list[str]]] = {}
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        found = [f"{e.primitive} {[v.aval for v in e.outvars]}" for e in body.eqns]
        layers.setdefault("/".join(layer.name.split("/")[:2]), []).append(found)
    assert layers["cells/002"] == layers["cells/003"]
    assert len(layers["cells/002"]) > 4


def test_bfloat16_is_computed_with_and_parameters_are_float32() -> None:
    workload = load("amoebanet", "tiny", dtype="bfloat16")
    params = jax.eval_shape(workload.init, KEY)
    jaxpr = jax.make_jaxpr(workload.loss_fn)(
        params, workload.initial_state(), workload.abstract_batch(2), KEY
    )
    convolved = [
        e.outvars[0].aval.dtype for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"
    ]
    assert set(convolved) == {jax.numpy.dtype("bfloat16")}
    assert {leaf.dtype for leaf in (*jax.tree.leaves(params), *jaxpr.out_avals)} == {
        np.dtype("float32")
    }


@pytest.mark.thorough
def test_two_stages_train_it_to_the_same_bits_as_one() -> None:
    workload, batch = (
        load("amoebanet", "tiny", cells=1, groups=1, stem_reductions=1),
        fake_images(size=8),
    )
    params, ends = jax.jit(workload.init)(KEY), []
    for plan in (
        jvpipe.Plan.from_cuts([13]),
        jvpipe.Plan.from_cuts([5, 8], devices=[1, 0]),
    ):  # 5 layers on another
        pipe = jvpipe.Pipeline(
            workload.loss_fn,
            optax.sgd(0.05),
            stages=plan,
            microbatches=2,
            has_aux=True,
            has_state=True,
        )
        state = pipe.init(params, batch, KEY, workload.initial_state())
        losses = []
        for _ in range(2):
            state, metrics = pipe.step(state, batch)
            losses.append(float(metrics["loss"]))
        ends.append((losses, pipe.params(state)))
        assert losses[1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cells": 4}, "cells=4 must be a multiple of groups=3"),
        ({"filters": 12}, "filters=12 must be a multiple of 8"),
        ({"stem_reductions": 3}, "stem_reductions=3 must be 0 for small images"),
        ({"dtype": "float16"}, "unknown dtype 'float16'"),
        ({"side": 4}, "side=4 is too small"),
        ({"size": "huge"}, "unknown size of amoebanet 'huge'"),
    ],
)
def test_what_load_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("amoebanet", **arguments)
