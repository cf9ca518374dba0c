"""The models of the command line at their tiny sizes: gradients equal plain JAX, and bits are the
same however cut.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.models import load
from tests.end_to_end.test_exactness import batch_of, key_of, plain_gradient, plain_gradients
from tests.end_to_end.test_fates import drawn
from tests.grid import grid
from tests.zoo import Case, quick_key

TEXT = ("transformer", "gnmt", "xlnet", "llama")
IMAGES = ("resnet", "vgg", "unet")
MODELS = (*TEXT, *IMAGES)
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
MICRO = 6  # interleaved lists want a multiple of the devices, 2 and 3


@cache
def case(name: str) -> Case:
    """A model with parameters and a batch in which every leaf tells."""
    workload, draw = load(name, "tiny"), np.random.default_rng(0)

    def filled(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if np.issubdtype(leaf.dtype, np.integer):
            return draw.integers(0, 4, leaf.shape).astype(leaf.dtype)
        if path[-1].key in ("weights", "masks"):
            return draw.integers(0, 2, leaf.shape).astype(leaf.dtype)
        return draw.normal(size=leaf.shape).astype(leaf.dtype)

    batch = jax.tree_util.tree_map_with_path(filled, workload.abstract_batch(5))
    params = jax.tree.map(np.asarray, jax.jit(workload.init)(quick_key(1)))
    params = jax.tree.map(
        lambda p: p + 0.1 * draw.normal(size=p.shape).astype(p.dtype) * (p.ndim == 1), params
    )
    flags = {"has_aux": workload.has_aux, "has_state": workload.has_state}
    return Case(workload.loss_fn, params, batch, quick_key(7), workload.initial_state(), **flags)


def stepped(
    m: Case, plan: int | jvpipe.Plan, schedule: str
) -> tuple[list[Any], float, jvpipe.Pipeline]:
    """Parameters, model state and loss after a step of plain descent; but for plans all stages are
    on one device.
    """
    devices = jax.devices()[:1] * plan if isinstance(plan, int) else jax.devices()[:2]
    planner = "jvpipe" if schedule == "auto" else "even"
    options: dict[str, Any] = {
        "schedule": schedule,
        "planner": planner,
        "devices": devices,
        **m.options,
    }
    pipe = jvpipe.Pipeline(m.loss_fn, optax.sgd(1.0), plan, MICRO, **options)
    state, metrics = pipe.step(
        pipe.init(m.params, batch_of(m, MICRO), key_of(m), m.state), batch_of(m, MICRO)
    )
    return (
        [*jax.tree.leaves(pipe.params(state)), *jax.tree.leaves(pipe.model_state(state))],
        float(metrics["loss"]),
        pipe,
    )


@cache
def alone(name: str) -> tuple[list[Any], float, jvpipe.Pipeline]:
    """What one stage yields."""
    return stepped(case(name), 1, "gpipe")


@pytest.mark.parametrize("name", grid(MODELS, "unet"))
def test_gradients_equal_plain_jax(name: str) -> None:
    m, (after, found, _) = case(name), alone(name)
    loss, gradients, state = plain_gradients(m, plain_gradient(m), MICRO)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    scale, before = float(optax.tree.norm(gradients)), jax.tree.leaves(m.params)
    for old, new, gradient in zip(before, after, jax.tree.leaves(gradients), strict=False):
        np.testing.assert_allclose(old - new, gradient, atol=1e-5 * scale + 1e-6)
    for ours, plain in zip(after[len(before) :], jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "schedule"),
    grid(
        product(MODELS, SYNCHRONOUS),
        *product(("transformer",), ("gpipe", "interleaved", "v-half")),
        ("unet", "zb-v"),
    ),
)
def test_every_schedule_gives_the_bits_of_one_stage(
    name: str, schedule: str, thorough: bool
) -> None:
    """At 2 stages or 3 in turns; if it is to be thorough, at both."""
    turn = MODELS.index(name) + SYNCHRONOUS.index(schedule)
    for stages in (2, 3) if thorough else (2 + turn % 2,):
        assert_same(stepped(case(name), stages, schedule), alone(name))


def test_an_order_that_is_searched_for_gives_the_bits_of_one_stage(thorough: bool) -> None:
    for name in MODELS if thorough else MODELS[-1:]:
        ours = stepped(case(name), 2, "auto")
        assert ours[2].plan.tasks, "it is part of the plan"
        assert_same(ours, alone(name))


@pytest.mark.parametrize("name", grid(MODELS, "transformer"))
def test_any_mix_of_fates_gives_the_bits_of_one_stage(name: str) -> None:
    graph = alone(name)[2].session.graph
    third, over = divmod(len(graph.layers), 3)
    plan = drawn(graph, (third, third + over, third), seed=1)
    stages = [replace(stage, devices=(d,)) for stage, d in zip(plan.stages, (0, 1, 0), strict=True)]
    assert_same(stepped(case(name), replace(plan, stages=tuple(stages)), "1f1b"), alone(name))


def assert_same(ours: tuple[list[Any], float, Any], theirs: tuple[list[Any], float, Any]) -> None:
    assert ours[1] == theirs[1]
    for a, b in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_array_equal(a, b)
