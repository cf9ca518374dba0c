"""A plan from shapes alone is what the command prints, and its peak is what a run under it
holds.
"""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cli.plan_command import main
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import Cluster, Link
from jvpipe.cost.presets import CORE, H100, RTX_2080TI
from jvpipe.models.recipe import Recipe
from tests.own import Plain

WIDE = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def test_what_is_returned_is_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    options = [
        "--model",
        "tests.own:Plain",
        "--stages",
        "2",
        "--microbatches",
        "4",
        "--hardware",
        "h100",
    ]
    assert main([*options, "--json", str(out)]) == 0
    printed, model = capsys.readouterr().out, Plain()
    batch = next(iter(model.batches(0, 32)))
    recipe = Recipe(1e-3).optimizer(1000)
    found = jvpipe.plan_for(
        model.loss_fn,
        model.init,
        batch,
        2,
        hardware="h100",
        microbatches=4,
        optimizer=recipe,
        title="Plain",
    )
    timed = ("planning_s",)
    assert {k: v for k, v in found.to_json().items() if k not in timed} == {
        k: v for k, v in json.loads(out.read_text()).items() if k not in timed
    }
    assert str(found).split("planned in")[0] == printed.split("planned in")[0]
    assert found.reasons[-1] in printed
    found.figure(tmp_path / "plan.svg")
    found.timeline(tmp_path / "plan.json")
    assert "Plain, 1f1b, jvpipe" in (tmp_path / "plan.svg").read_text()
    spans = list(found.simulation.spans())
    assert max(span.end_s for span in spans) == pytest.approx(found.step_s)
    assert found.lower_bound_s <= found.step_s * (1 + 1e-9)


def test_nothing_is_allocated_and_several_planners_are_compared() -> None:
    before = {id(array) for array in jax.live_arrays()}
    found = jvpipe.plan_for(
        loss_fn, [WIDE] * 4, WIDE, 2, hardware="v100-a", planner=["even", "dapple"]
    )
    assert {id(array) for array in jax.live_arrays()} <= before
    assert isinstance(found, jvpipe.Forecast)
    assert [each.planner for each in found.answers] in (["even", "dapple"], ["dapple", "even"])
    assert (found.plan.cuts, len(found.to_json())) == ((2, 2), 2)


def test_a_limit_that_no_plan_keeps_names_one_that_would_do() -> None:
    found = jvpipe.plan_for(loss_fn, [WIDE] * 4, WIDE, 2, memory_limit="1MiB")
    assert not found.fits
    assert found.step_s == math.inf
    with pytest.raises(jvpipe.MemoryLimitExceeded) as refused:
        found.plan  # noqa: B018
    limit = refused.value.smallest_limit_bytes
    assert f"no plan: {refused.value}" in str(found)
    assert jvpipe.plan_for(loss_fn, [WIDE] * 4, WIDE, 2, memory_limit=limit).fits
    over = jvpipe.plan_for(loss_fn, [WIDE] * 4, WIDE, 2, memory_limit="1MiB", planner="even")
    with pytest.raises(jvpipe.MemoryLimitExceeded, match="even looks at no limit"):
        over.plan  # noqa: B018


def test_a_plan_over_the_limit_is_said_with_the_bytes_of_the_whole_device() -> None:
    ask = partial(
        jvpipe.plan_for, loss_fn, [WIDE] * 8, WIDE, 2, planner="even", schedule="interleaved"
    )
    held = re.search(r"takes (\d+) bytes on device 0", ask(memory_limit="1KiB").why_not())
    assert held
    enough = int(held[1])
    assert ask(memory_limit=enough).fits
    assert not ask(memory_limit=enough - 1).fits


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "auto", "pipedream"])
def test_the_plans_peak_is_the_ledgers(schedule: str) -> None:
    params = [jnp.eye(16) * (1 + i / 9) for i in range(6)]
    batch = np.ones((16, 16), np.float32)
    adamw = optax.adamw(1e-3)
    found = jvpipe.plan_for(
        loss_fn,
        params,
        batch,
        2,
        hardware="cpu",
        microbatches=4,
        schedule=schedule,
        optimizer=adamw,
    )
    pipe = jvpipe.Pipeline(loss_fn, adamw, found.plan, microbatches=4, schedule=schedule)
    state = pipe.init(params, batch, jax.random.key(0))
    for state, _ in pipe.run(state, [batch] * 4):  # noqa: B020
        jax.block_until_ready(state)
    held = [pipe.ledger.peak_bytes[device] for device in jax.devices()[:2]]
    assert found.held_bytes == held
    counted = [stage["peak_bytes"] for stage in found.to_json()["stages"]]
    assert schedule != "1f1b" or all(h <= c <= 1.1 * h for h, c in zip(held, counted, strict=True))


def test_unlike_devices_get_layers_by_what_they_can_do(tmp_path: Path) -> None:
    mixed = Cluster("mixed", H100, 2, unlike=(RTX_2080TI, H100), peer=Link(1e12), host=Link(1e12))
    found = jvpipe.plan_for(loss_fn, [WIDE] * 12, WIDE, 2, hardware=mixed)
    slow, fast = sorted(found.plan.stages, key=lambda stage: len(stage.layers))
    assert (slow.devices, fast.devices) == ((0,), (1,))
    assert any("(RTX 2080 Ti): 11.00 GiB" in reason for reason in found.reasons)
    assert "device 1 (H100 80 GB)" in str(found)
    held = [stage["peak_bytes"] for stage in found.to_json()["stages"]]
    assert isinstance(found, jvpipe.Forecast)
    limits = dict(enumerate(found.problem.limits))
    assert all(
        size <= limits[stage.devices[0]]
        for size, stage in zip(held, found.plan.stages, strict=True)
    )
    assert found.lower_bound_s <= found.step_s
    found.figure(tmp_path / "plan.svg")
    again = jvpipe.plan_for(
        loss_fn, [WIDE] * 12, WIDE, 2, hardware=mixed, schedule="auto", memory_limit="4GiB,3GiB"
    )
    assert isinstance(again, jvpipe.Forecast)
    assert again.problem.limits == (4 * 2**30, 3 * 2**30)
    compared = jvpipe.plan_for(loss_fn, [WIDE] * 12, WIDE, 2, hardware=mixed, planner="all")
    assert compared.step_s == pytest.approx(found.step_s)
    told = {each["planner"]: [x["devices"] for x in each["stages"]] for each in compared.to_json()}
    assert told["jvpipe"] == [list(x.devices) for x in found.plan.stages]


def test_names_of_devices_are_printed_as_they_are() -> None:
    unlike = replace(H100, name="[/x]"), replace(RTX_2080TI, name="[red] :smile:")
    mixed = Cluster("mixed", H100, 2, unlike=unlike, peer=Link(1e12), host=Link(1e12))
    text = str(jvpipe.plan_for(loss_fn, [WIDE] * 4, WIDE, 2, hardware=mixed))
    table, _, reasons = text.partition("planner jvpipe")
    for device in unlike:
        assert f"({device.name})" in table
        assert f"({device.name})" in reasons


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"memory_limit": ["1GiB"] * 3},
            r"3 memory limits \(1.00 GiB, 1.00 GiB, 1.00 GiB\) for 2 devices: give one",
        ),
        ({"hardware": "h10"}, "h100"),
        ({"stages": 0}, "stages must be a whole number of at least 1"),
        (
            {"stages": jvpipe.Plan.from_cuts([3, 1])},
            r"not a plan of \[3, 1\] layers: .* give cuts=\[3, 1\]",
        ),
        (
            {"stages": 9, "hardware": Cluster("two", CORE, 2)},
            "9 stages need as many devices, two has 2",
        ),
        ({"planner": "jvpip"}, "did you mean 'jvpipe'"),
        ({"planner": ["even", 3]}, "planner must be a name such as 'jvpipe', not 3"),
        ({"microbatches": 7}, "7 micro-batches do not divide the 2048 examples"),
        ({"optimizer": optax.adamw}, "the optimizer must be an optax transformation"),
        ({"has_state": True}, "has_state=True"),
    ],
)
def test_mistakes(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        jvpipe.plan_for(loss_fn, [WIDE] * 4, WIDE, **options)


def test_the_optimizer_s_state_may_lie_on_the_host() -> None:
    wide = jax.ShapeDtypeStruct((512, 512), jnp.float32)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        for w in params:
            batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2)

    asked = {"stages": 2, "hardware": "h100", "optimizer": optax.adam(1e-3), "planner": "even"}
    kept, away = (
        jvpipe.plan_for(loss_fn, [wide] * 8, wide, state_fates=fates, **asked)
        for fates in (None, {"*": "swap", "7": "keep"})
    )
    fates = dict.fromkeys("456", "swap") | {"7": "keep"}
    assert [s.state_fates for s in away.plan.stages] == [dict.fromkeys("0123", "swap"), fates]
    moments = 2 * 512 * 512 * 4
    assert away.state_s == pytest.approx(find_cluster("h100").host.seconds(4 * moments), rel=0.1)
    assert away.step_s == pytest.approx(kept.step_s + away.state_s)
    assert away.to_json()["step_s"] == away.step_s
    assert f"step {1e3 * away.step_s:.2f} ms" in str(away)
    told, other = (f.to_json()["stages"] for f in (away, kept))
    assert told[0]["peak_bytes"] == other[0]["peak_bytes"] - 2 * moments  # that of two stays
    assert told[1]["state_fates"] == fates
    assert "state_fates" not in other[0]
    assert away.reasons[-1].startswith("the optimizer's state that lies on the host")
    with pytest.raises(ValueError, match="unknown parameter 'x' in state_fates"):
        jvpipe.plan_for(loss_fn, [wide] * 8, wide, state_fates={"x": "swap"}, **asked)


def test_each_compared_plan_has_the_seconds_of_its_own_copies_of_state() -> None:
    wide = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    wider = [jax.ShapeDtypeStruct((rows, 1024), jnp.float32) for rows in (512, 1024)]
    plan_for = partial(jvpipe.plan_for, loss_fn, [wide] * 4 + wider, wide, hardware="h100")
    names = ["even", "dapple"]
    kept, away = (plan_for(planner=names, state_fates=fates) for fates in (None, {"*": "swap"}))
    alone = [plan_for(planner=name, state_fates={"*": "swap"}).step_s for name in names]
    told = {each["planner"]: each for each in away.to_json()}
    assert [told[name]["step_s"] for name in names] == alone
    # The plan of dapple has less state on its fullest device.
    assert [each["planner"] for each in kept.to_json()] == names
    assert list(told) == names[::-1]
    busy_s = [(1 - each["bubble_fraction"]) * each["step_s"] for each in told.values()]
    kept_s = [(1 - each["bubble_fraction"]) * each["step_s"] for each in kept.to_json()]
    assert busy_s == pytest.approx(kept_s[::-1])


@pytest.mark.parametrize("shared", [{"stages": 2}, {"replicas": (2, 1)}])
def test_state_goes_to_the_host_where_nothing_fits_else(shared: dict[str, Any]) -> None:
    wide = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        for w in params:
            batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2)

    asked = {"hardware": "cpu", "optimizer": optax.adam(1e-3), "microbatches": 4, **shared}
    plan_for = partial(jvpipe.plan_for, loss_fn, [wide] * 8, wide, **asked)
    with pytest.raises(jvpipe.MemoryLimitExceeded) as error:
        _ = plan_for(memory_limit=1).plan
    least, parameter = error.value.smallest_limit_bytes, 256 * 256 * 4
    counts = []
    for limit in (least, least + 3 * parameter, 100 * parameter):
        forecast = plan_for(memory_limit=limit)
        counts.append(sum(len(stage.state_fates) for stage in forecast.plan.stages))
        assert (forecast.state_s > 0) == (counts[-1] > 0)
        assert max(forecast.held_bytes) <= limit
    assert counts[0] > counts[1] > counts[2] == 0
    assert not plan_for(memory_limit=least, state_fates={"*": "keep"}).fits
