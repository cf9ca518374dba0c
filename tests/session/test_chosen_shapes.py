"""How many devices each stage of a pipeline has is decided, and one each where there can be no
more.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cost.costs import Costs
from jvpipe.cost.estimate import estimate
from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link
from jvpipe.cost.links import Links
from jvpipe.session import measuring

D, MICRO = 4, 2
PARAMS = [0.4 * np.eye(D, dtype=np.float32) + 0.1 for _ in range(4)]
BATCH = np.linspace(-1, 1, 16 * D, dtype=np.float32).reshape(16, D)
DEVICES: Any = jax.devices()[:4]


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.fixture(autouse=True)
def _paced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that take as long as they compute, on links as a test wants them."""
    peer = getattr(request, "param", Link(1e12))
    device = Accelerator("slow", 10**9, 1e9, {"float32": 1e6}, launch_s=0.0)

    def costs(traced: Any, *_: Any, fates: bool, **__: Any) -> Costs:
        return estimate(traced, Cluster("one", device, 1), fates=fates)

    monkeypatch.setattr(measuring, "measured_costs", costs)
    links = Links(INFINITE, INFINITE, peer, send_uses_host=False)
    monkeypatch.setattr(measuring, "links_between", lambda *_: links)


def begun(loss: Any = loss_fn, **options: Any) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    options = {"microbatches": MICRO, "replicas": "auto", "devices": DEVICES} | options
    pipe = jvpipe.Pipeline(loss, optax.sgd(0.1), **options)
    return pipe, pipe.init(PARAMS, BATCH, None)


def test_alike_layers_on_fast_links_are_data_parallel_and_train_as_one_device() -> None:
    pipe, state = begun()
    assert pipe.plan.replicas == (4,)
    told = pipe.explain()
    assert "on 4 devices data parallel, 4 devices for all layers" in told
    assert "stage 0 has 4 devices because with 3 a step would take" in told
    assert "straight, 4 stages of one device, micro-batches of 8" in told
    plain, alone = begun(replicas=None, stages=1)
    for _ in range(2):
        state, metrics = pipe.step(state, BATCH)
        alone, wanted = plain.step(alone, BATCH)
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
    for a, b in zip(pipe.params(state), plain.params(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_planners_of_the_papers_decide_too() -> None:
    pipe, _ = begun(planner="dapple")
    assert (pipe.plan.replicas, pipe.plan.planner) == ((4,), "dapple")


def test_given_stages_are_kept() -> None:
    pipe, _ = begun(stages=3)
    assert len(pipe.plan.stages) == 3
    assert sum(pipe.plan.replicas) == 4


@pytest.mark.parametrize("_paced", [Link(1e12, 1.0)], indirect=True)
def test_on_slow_links_each_stage_has_one_device_and_cuts_are_planned_as_ever() -> None:
    pipe, _ = begun(stages=2)
    assert pipe.plan.replicas == (1, 1)
    assert pipe.session.compiled_plans.planned is not None
    assert "on 4 devices straight, 2 stages of one device" in pipe.explain()
    assert "goes to stage 1 because" in pipe.explain()


def coupled(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = loss_fn(params[:3], batch, rng) + batch @ params[3]
    return jnp.mean((x - jnp.max(x)) ** 2)


@pytest.mark.parametrize(
    ("options", "told", "stages"),
    [
        (
            {"schedule": "pipedream", "devices": DEVICES[:2]},
            "under pipedream they are not planned yet",
            2,
        ),
        ({"schedule": "auto", "devices": DEVICES[:1]}, "an order that a planner has chosen", 1),
        ({"devices": DEVICES[:1]}, "there are no more", 1),
        ({"loss": coupled, "stages": 2}, "each stage has one device: ", 2),
        (
            {"microbatches": 16, "stages": 2},
            "a micro-batch has one example, use fewer micro-batches",
            2,
        ),
    ],
)
def test_one_each_where_there_can_be_no_more(
    options: dict[str, Any], told: str, stages: int
) -> None:
    pipe, _ = begun(**options)
    assert set(pipe.plan.replicas) == {1}
    assert len(pipe.plan.stages) == stages
    assert told in pipe.explain()


def test_a_limit_that_replicas_do_not_keep_leaves_one_each() -> None:
    with pytest.raises(jvpipe.MemoryLimitExceeded) as refused:
        begun(memory_limit=100)
    enough = refused.value.smallest_limit_bytes
    pipe, _ = begun(memory_limit=enough)
    assert max(peak.bytes for peak in pipe.session.peaks if peak) <= enough


def test_a_changed_model_has_the_stages_of_the_one_before() -> None:
    pipe, state = begun(devices=DEVICES[:1])
    state = pipe.update_model(
        state, lambda params, batch, rng: 2 * loss_fn(params, batch, rng), PARAMS
    )
    assert pipe.plan.replicas == (1,)
    pipe.step(state, BATCH)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"planner": "vpipe"},
            "replicas='auto' is decided by planners jvpipe, pipedream, dapple, not by 'vpipe'",
        ),
        (
            {"planner": "dapple", "stages": 2},
            "planner 'dapple', which decides the number of stages itself",
        ),
        (
            {"stages": jvpipe.Plan.from_cuts([4])},
            r"given with a plan, whose stages have \(1,\) devices: leave it out",
        ),
        ({"stages": 5}, "5 stages need 5 devices, there are 4: use at most 4"),
        ({"devices": [*DEVICES, DEVICES[0]]}, "is named twice"),
        ({"replicas": "many"}, r"such as \(2, 1\), or 'auto', not 'many'"),
    ],
)
def test_mistakes(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        begun(**options)
