"""Plans of replicated stages from shapes alone: what is decided, what is said of it, and that the
plan runs.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cli.plan_command import main
from jvpipe.cost.hardware import Accelerator, Cluster, Link
from jvpipe.session.forecast import Forecast
from tests.grid import grid

GPU = Accelerator("small", 2**30, 1e11, {"float32": 1e12}, launch_s=1e-6)
FAST = Cluster("fast", GPU, 4, peer=Link(1e12))
SLOW = Cluster("slow", GPU, 1, 4, network=Link(1e9, 1e-5))
FIELDS = [
    "layers",
    "devices",
    "replicas",
    "forward_s",
    "backward_s",
    "recompute_s",
    "swap_s",
    "comm_s",
    "reduce_s",
    "update_s",
]
BATCH = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def weights(*widths: int) -> list[Any]:
    return [jax.ShapeDtypeStruct((a, b), jnp.float32) for a, b in pairwise(widths)]


def planned(params: Any = None, **options: Any) -> Forecast:
    options = {"hardware": FAST, "optimizer": optax.sgd(0.1)} | options
    return jvpipe.plan_for(loss_fn, params or weights(*[64] * 7), BATCH, **options)


def test_alike_layers_on_fast_links_are_data_parallel() -> None:
    found = planned(devices=4)
    assert found.plan.replicas == (4,)
    assert (found.plan.schedule, found.plan.planner) == ("1f1b", "jvpipe")


def test_large_parameters_at_the_end_and_slow_links_leave_the_last_layers_alone() -> None:
    wide = 2**13  # as VGG: what comes first computes, what comes last is all parameters
    batch = jax.ShapeDtypeStruct((64, 64, 128), jnp.float32)

    def convolves(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch
        for w in params[:6]:
            x = jnp.tanh(x @ w)
        return jnp.mean((jnp.mean(x, 1) @ params[6] @ params[7]) ** 2)

    params = weights(*[128] * 7, wide, wide)
    found = jvpipe.plan_for(
        convolves, params, batch, devices=4, hardware=SLOW, optimizer=optax.sgd(0.1)
    )
    assert found.plan.replicas == (3, 1)
    assert found.plan.stages[-1].layers[-2:] == (6, 7)


def test_what_is_exported_has_the_micro_batches_that_were_asked_for() -> None:
    for options in ({"devices": 4}, {"devices": 4, "stages": 4}, {"stages": 4}):
        found = planned(microbatches=8, **options)
        outline = found.plan.outline
        assert outline is not None
        assert outline.microbatches == found.microbatches == 8


def test_one_micro_batch_is_one() -> None:
    assert "1 micro-batch of 64: " in str(planned(devices=2, microbatches=1))
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), 2, 1)
    assert "1 micro-batch, 1f1b" in str(pipe.session.settings)


def test_pins_are_kept_and_fields_say_what_the_plan_is() -> None:
    found = planned(replicas="2:1", cuts=[4, 2], microbatches=8)
    told = found.to_json()
    assert (told["devices"], told["microbatches"], found.microbatches) == (3, 8, 8)
    assert [set(FIELDS) <= set(stage) for stage in told["stages"]] == [True, True]
    assert [(x["replicas"], x["devices"], len(x["layers"])) for x in told["stages"]] == [
        (2, [0, 1], 4),
        (1, [2], 2),
    ]
    assert told["stages"][0]["reduce_s"] > 0
    assert told["stages"][1]["reduce_s"] == 0
    assert found.lower_bound_s <= found.step_s
    assert planned(devices=3, stages=2).plan.device_count <= 3


def test_the_command_says_what_other_shapes_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "plan.json", tmp_path / "timeline.json"
    model = [
        "--model",
        "tests.own:Plain",
        "--hardware",
        "v100-b",
        "--batch-size",
        "32",
        "--replicas",
        "auto",
    ]
    assert main([*model, "--devices", "4", "--json", str(out), "--timeline", str(trace)]) == 0
    found, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert found["feasible"]
    assert found["step_s"] == min(each["step_s"] for each in found["shapes"])
    assert shown.count("times as long") == len(found["shapes"]) - 1
    assert "no plan is under" in shown
    ends = [
        event["ts"] + event["dur"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if "dur" in event
    ]
    assert max(ends) == pytest.approx(1e6 * found["step_s"])


def test_a_plan_runs_as_it_is() -> None:
    params = [0.5 * np.eye(8, dtype=np.float32)] * 3
    batch = np.ones((256, 8), np.float32)
    pinned: Any = {"replicas": (2, 1), "microbatches": 4}
    cpus = replace(FAST, device=replace(GPU, platform="cpu"))  # whose programs run here
    found = jvpipe.plan_for(loss_fn, params, batch, **pinned, hardware=cpus, memory_limit="12kB")
    assert {fate for stage in found.plan.stages for fate in stage.fates.values()} == {"recompute"}
    pipe = jvpipe.Pipeline(loss_fn, optax.adamw(1e-3), found.plan, microbatches=4)
    _, metrics = pipe.step(pipe.init(params, batch, None), batch)
    assert found.held_bytes == [pipe.ledger.peak_bytes[device] for device in jax.devices()[:3]]
    planned = [stage["peak_bytes"] for stage in found.to_json()["stages"]]
    assert all(
        most <= planned[stage] for most, stage in zip(found.held_bytes, (0, 0, 1), strict=True)
    )
    np.testing.assert_allclose(metrics["loss"], loss_fn(params, batch, None), rtol=1e-6)


@pytest.mark.parametrize("planner", grid(["dapple", "pipedream"], "pipedream"))
def test_planners_of_the_papers_are_asked_by_name(planner: str) -> None:
    found = planned(devices=4, planner=planner)
    assert found.plan.planner == planner
    assert f"planner {planner}, schedule 1f1b, on 4 devices" in str(found)
    assert found.step_s >= planned(devices=4).step_s
    tight = planned(devices=4, planner=planner, memory_limit="20kB")
    with pytest.raises(jvpipe.MemoryLimitExceeded, match=planner) as no:
        tight.plan  # noqa: B018
    assert planned(devices=4, planner=planner, memory_limit=no.value.smallest_limit_bytes).fits


def test_a_cluster_too_small_says_by_how_much() -> None:
    found = planned(devices=4, memory_limit="20kB")
    assert not found.fits
    with pytest.raises(jvpipe.MemoryLimitExceeded, match=r"limit that would do is \d+ bytes") as no:
        found.plan  # noqa: B018
    assert planned(devices=4, memory_limit=no.value.smallest_limit_bytes).fits


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"stages": 5, "devices": 4},
            "5 stages on 4 devices: each stage needs one, use at most 4 stages or at least",
        ),
        ({"devices": 5}, "5 devices: fast has 4, use fewer devices or a cluster of more machines"),
        ({"devices": 0}, "devices must be a whole number of at least 1, not 0"),
        ({"devices": 2, "replicas": "2:1"}, r"replicas \(2, 1\) take 3 devices, there are 2"),
        (
            {"replicas": "two"},
            r"replicas must be the devices of each stage, such as \(2, 1\), or 'auto', not 'two'",
        ),
        (
            {"replicas": (3, 1), "microbatches": 32},
            "3 replicas cannot share micro-batches of 2 examples, each needs 1",
        ),
        ({"replicas": (2, 1), "cuts": (9, 1)}, r"cuts \(9, 1\) are of 10 layers, the model has 6"),
        ({"devices": 4, "microbatches": 7}, "7 micro-batches do not divide the 64 examples"),
        (
            {"devices": 4, "schedule": "pipedream"},
            "replicas are planned for synchronous schedules, not for 'pipedream'",
        ),
        ({"devices": 4, "schedule": "auto"}, "cannot run under an order that a planner has chosen"),
        (
            {"replicas": (2, 1), "cuts": (3, 3), "schedule": "interleaved"},
            "which runs 2 stages per device: leave cuts out",
        ),
        ({"devices": 4, "planner": "vpipe"}, "planner 'vpipe' gives each stage one device"),
        (
            {"devices": 4, "planner": "jvpipe,dapple"},
            "jvpipe, dapple: replicas are planned by one at a time",
        ),
        (
            {"replicas": (2, 1), "planner": "dapple"},
            "planner 'dapple' decides stages, replicas and cuts itself",
        ),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        planned(**options)


def test_mistakes_of_the_command_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "tests.own:Plain", "--hardware", "v100-b"]
    for wrong, told in (
        (["--stages", "20", "--devices", "16"], "20 stages on 16 devices"),
        (["--devices", "0"], "--devices must be a whole number of at least 1, not 0"),
        (["--devices", "4", "--compare", "all"], "gives each stage one device"),
        (["--replicas", "64:1", "--devices", "128"], "128 devices: v100-b has 16"),
    ):
        assert main([*model, *wrong]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
    assert main(["--graph", "x.txt", "--devices", "4"]) == 2
    assert "--devices 4 is for --model" in capsys.readouterr().err


@pytest.mark.parametrize("fast", [0, 1])
def test_over_a_slow_link_a_slow_device_stays_idle_wherever_it_is_listed(fast: int) -> None:
    old = Accelerator("old", 2**30, 2e10, {"float32": 2e11}, launch_s=1e-6)
    kinds = (GPU, old) if fast == 0 else (old, GPU)
    slow_link = Cluster("lab", kinds[0], 2, unlike=kinds, peer=Link(5e8), host=Link(1e10))
    wide = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    batch = jax.ShapeDtypeStruct((4096, 2048), jnp.float32)

    def ask(**shape: Any) -> Any:
        return jvpipe.plan_for(
            loss_fn, [wide] * 4, batch, hardware=slow_link, microbatches=4, **shape
        )

    free = ask(devices=2)
    assert [stage.devices for stage in free.plan.stages] == [(fast,)]
    # With two stages, the planner also decides which device comes first.
    one_each = ask(replicas=(1, 1))
    assert one_each.step_s == pytest.approx(ask(stages=2).step_s)
    assert free.step_s < one_each.step_s
