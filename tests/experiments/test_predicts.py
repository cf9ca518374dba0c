"""What is fitted and what judges, and steps drawn by hand; models are small."""

import json
import math
import re

import numpy as np
import optax
import pytest

from experiments.predicts import busy, torchgpipe
from experiments.predicts.cases import AMOEBANET, PROFILES, TABLES, UNET, VPIPE, Case, halves
from experiments.predicts.layers import layers_of, run_by, update_s
from experiments.predicts.pipeline import Order, Stage, step_s
from experiments.predicts.torchgpipe import Setting, amoebanet_shares, stages, unet_shares
from jvpipe.cost.families import PYTORCH, TENSORFLOW
from jvpipe.cost.frameworks import XLA, Framework
from jvpipe.cost.presets import P40, V100
from jvpipe.models import load
from jvpipe.schedules import find_schedule
from jvpipe.simulate.stages import StageLoad, stage_work
from jvpipe.simulate.work_parts import Features
from tests.real_profiles import profile

FITTED = [
    *("n=2, m=1", "n=2, m=4", "n=2, m=32", "n=4, m=32", "Pipeline-1", "Pipeline-4"),
    *("GPipe + RC, M=5", "DAPPLE, M=8", "DAPPLE, M=16", "DAPPLE + RC, M=16", "bert24"),
]
"""As they were drawn before anything was fitted."""


def test_what_is_fitted_was_drawn_once_and_for_all() -> None:
    assert [case.name for case, half in halves().items() if half == "fitted"] == FITTED


@pytest.mark.parametrize("seed", range(20))
def test_no_draw_fits_what_plans_rest_on(seed: int) -> None:
    drawn = halves(seed=seed)
    assert all(drawn[case] == "judged" for case in (*AMOEBANET[6:], *VPIPE))
    assert len(drawn) == sum(map(len, TABLES)) == 27


@pytest.mark.parametrize("case", PROFILES[:2], ids=lambda case: case.name)
def test_rates_of_profiles_are_those_of_their_files(case: Case) -> None:
    told = profile(f"pipedream_{case.name}.graph.txt").read_text()
    nodes = [line for line in told.splitlines() if line[:1].strip() and "-- Input" not in line]
    ms = sum(
        float(number) for line in nodes for number in re.findall(r"compute_time=([\d.]+)", line)
    )
    assert case.published == pytest.approx(128 / ms * 1e3, rel=1e-5)


def test_the_rate_of_bert_is_that_of_its_file() -> None:
    told = json.loads(profile("dnn_partitioning_bert24_training.json").read_text())
    ms = sum(node["fpgaLatency"] for node in told["nodes"])
    assert PROFILES[2].published == pytest.approx(8 / ms * 1e3, rel=1e-5)


def test_recomputation_runs_while_cotangents_are_awaited() -> None:
    first, last = Stage(1.0, 1.0, 2.0), Stage(1.0, 1.0, 2.0)
    # first   F0 F1 .. .. .. R1 B1 B1 R0 B0 B0    R1 in the gap before B1
    # last    .. F0 F1 R1 B1 B1 R0 B0 B0
    assert step_s("gpipe", [first, last], 2) == 11.0
    # the last micro-batch is not computed again: everything but R0 is one earlier
    assert step_s("gpipe", [first, last], 2, all_again=False) == 10.0
    assert step_s("1f1b", [first, last], 2) == 11.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_step_takes_as_long_as_the_simulator_says(order: Order, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, microbatches = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    stages = [Stage(*map(float, rng.uniform(1, 3, 3))) for _ in range(count)]
    loads = [StageLoad(s.forward_s, s.backward_s, s.again_s).parts_s for s in stages]
    lists = find_schedule(order).tasks(count, microbatches)
    work = stage_work(lists, Features.of(loads, shared=False))
    seconds = work.seconds(loads)
    expected = max(np.add(work.work.starts_s(seconds), seconds))
    assert step_s(order, stages, microbatches) == pytest.approx(expected)


def test_sends_are_waited_for_in_both_directions() -> None:
    slow = Stage(1.0, 0.0, 2.0, send_s=5.0)
    assert step_s("gpipe", [slow, Stage(1.0, 0.0, 2.0)], 1) == 1 + 5 + 1 + 2 + 5 + 2


def test_every_layer_of_ours_is_one_of_theirs_and_all_balances_hold_all_of_theirs() -> None:
    unet = [
        *(f"down_{level}/{i:03}" for level in range(5) for i in range(5)),
        *("bottom", *(f"up_{level}/{i:03}" for level in range(4, -1, -1) for i in range(5))),
        "segment",
    ]
    places = [at for name in unet for at, _ in unet_shares(name)]
    assert places == sorted(set(places))
    assert places[-1] + 1 == sum(torchgpipe.UNET["Naive-1"].balance)
    assert sum(share for name in unet for _, share in unet_shares(name)) == len(unet)
    assert [amoebanet_shares(f"cells/{i:03}")[0][0] for i in (0, 21)] == [1, 22]
    for settings, layers in ((torchgpipe.UNET, 241), (torchgpipe.AMOEBANET, 24)):
        assert {sum(setting.balance) for setting in settings.values()} == {layers}
    assert {case.name for case in AMOEBANET} == torchgpipe.AMOEBANET.keys()
    assert {case.name for case in UNET} == torchgpipe.UNET.keys()


def test_stages_hold_the_seconds_of_their_layers() -> None:
    layers = layers_of("unet", "tiny", 4, run_by(PYTORCH, P40))
    (whole,) = stages(layers, Setting(4, 1, (241,)), unet_shares)
    assert whole.forward_s == pytest.approx(sum(layer.forward_s for layer in layers))
    assert whole.again_s == whole.forward_s
    two = list(stages(layers, Setting(4, 1, (110, 131), again=False), unet_shares))
    assert sum(stage.backward_s for stage in two) == pytest.approx(whole.backward_s)
    assert [stage.again_s for stage in two] == [0.0, 0.0]


@pytest.mark.thorough
def test_frameworks_that_fuse_less_move_more_and_hosts_are_waited_for() -> None:
    def seconds(framework: Framework) -> float:
        layers = layers_of("bert", "tiny", 8, run_by(framework, V100))
        return sum(layer.seconds for layer in layers)

    waited_s = seconds(PYTORCH)  # for the host: the model is small
    assert seconds(XLA) < waited_s
    assert seconds(Framework("slower", host_s=1e-3)) == pytest.approx(100 * waited_s)


def test_updates_move_what_their_equations_read_and_write() -> None:
    count, rate = 10**8, V100.memory_bytes_per_s
    sgd, adam = (
        [update_s(optimizer, count, run_by(by, V100)) * rate / count for by in (XLA, TENSORFLOW)]
        for optimizer in (optax.sgd(0.1), optax.adamw(1e-3))
    )
    assert sgd[0] == pytest.approx(12, rel=0.01)  # a parameter and its gradient, and the new one
    assert 28 < adam[0] < 44
    assert adam[1] > 3 * adam[0]


def test_sizes_may_be_set() -> None:
    (tokens,) = {
        math.prod(leaf.shape[1:])
        for name, leaf in load("bert", "tiny", tokens=24).abstract_batch(2).items()
        if name == "tokens"
    }
    assert tokens == 24


def test_steps_beside_busy_neighbors_are_told_with_what_others_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = iter(
        [busy.Measured(1.0, 1.1, 0.0), busy.Measured(2.0, 1.6, 0.02), busy.Measured(1, 1, 0)]
    )
    monkeypatch.setattr(busy, "measured", lambda model, schedule: next(found))
    *_, row, last = busy.rows(["bert"])
    assert row == (
        "| bert | 1100.0 / 1000.0 = 1.10 | 1600.0 / 2000.0 = 0.80 | 1000.0 / 1000.0 = 1.00 | 2% |"
    )
    assert last.startswith("\nmedian 1.000 ")
    assert "worst 0.80 " in last
