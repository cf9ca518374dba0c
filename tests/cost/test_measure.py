"""Measuring: each distinct program once, and a table like that of the estimate."""

from dataclasses import replace

import jax
import pytest

from jvpipe.cost.estimate import estimate
from jvpipe.cost.measure import measure_programs, measured_costs
from jvpipe.cost.presets import PRESETS
from jvpipe.programs.model_programs import (
    Share,
    backward_program,
    forward_program,
    kept_names,
    layer_programs,
)
from jvpipe.programs.store import ProgramStore, shared_store
from tests.cost.traces import MICROBATCHES, optimizer, programs, traced
from tests.zoo import B, D


def test_equal_layers_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(forward_program(made), backward_program(made)) for made in programs("mlp")]
    compiled = []
    compile_all = ProgramStore.compile

    def counted(self: ProgramStore, wanted: list) -> list:
        compiled.extend(program.key for program, _ in wanted)
        return compile_all(self, wanted)

    monkeypatch.setattr(ProgramStore, "compile", counted)
    runs = measure_programs(
        shared_store(), [program for pair in pairs for program in pair], jax.devices()[0]
    )
    assert len(compiled) == len(set(compiled)) == len(runs) < 2 * len(pairs)
    assert all(run.seconds > 0 and run.temporary_bytes >= 0 for run in runs.values())


def test_measured_costs_are_estimates_with_other_seconds() -> None:
    model, store = traced("pre-norm"), shared_store()
    measured = measured_costs(model, jax.devices()[0], store, optimizer("pre-norm"), MICROBATCHES)
    guessed = estimate(model, PRESETS["cpu"], optimizer("pre-norm"), MICROBATCHES)
    assert measured.edges == guessed.edges
    assert measured.shared == guessed.shared
    for a, b in zip(measured.layers, guessed.layers, strict=True):
        assert (a.parameter_bytes, a.gradient_bytes, a.optimizer_bytes, a.input_bytes) == (
            b.parameter_bytes,
            b.gradient_bytes,
            b.optimizer_bytes,
            b.input_bytes,
        )
        assert a.forward_s > 0
        assert a.options[0] == b.options[0]
        assert [o.fates for o in a.options] == [o.fates for o in b.options]
        assert [o.kept_bytes for o in a.options] == [o.kept_bytes for o in b.options]
        assert all(0 <= o.extra_s <= a.options[-1].extra_s for o in a.options)


def test_what_there_is_no_room_for_is_estimated_and_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, store, device = traced("mlp"), shared_store(), jax.devices()[0]
    known = {}
    measured = measured_costs(model, device, store, optimizer("mlp"), MICROBATCHES, earlier=known)
    guessed = estimate(model, PRESETS["cpu"], optimizer("mlp"), MICROBATCHES)
    forwards = [forward_program(made).key for made in layer_programs(store, model, "all")]
    left = {key: run for key, run in known.items() if key != forwards[0]}
    monkeypatch.setattr("jvpipe.cost.measure._seconds", lambda *_: pytest.fail("this was run"))
    costs = measured_costs(
        model, device, store, optimizer("mlp"), MICROBATCHES, earlier=left, room_bytes=0
    )
    assert forwards[0] not in left, "a later look may find room"
    assert costs.layers[1].backward_s == measured.layers[1].backward_s
    alone = measured_costs(
        model, device, store, optimizer("mlp"), MICROBATCHES, earlier={}, room_bytes=0
    )
    for a, b in zip(alone.layers, guessed.layers, strict=True):
        assert a.forward_s == pytest.approx(b.forward_s)


def test_bytes_beside_those_given_are_the_compilers() -> None:
    model, store, device = traced("pre-norm"), shared_store(), jax.devices()[0]
    measured = measured_costs(model, device, store, optimizer("pre-norm"), MICROBATCHES)

    def needed(share: Share) -> list[int]:
        backwards = [backward_program(made) for made in layer_programs(store, model, share)]
        compiled = store.compile([(program, device) for program in backwards])
        return [executable.memory_analysis().temp_size_in_bytes for executable in compiled]

    more = [max(b - a, 0) for a, b in zip(needed("all"), needed("nothing"), strict=True)]
    assert [layer.options[-1].extra_bytes for layer in measured.layers] == more


def test_layers_are_timed_as_if_all_devices_were_busy() -> None:
    model, store, device = traced("mlp"), shared_store(), jax.devices()[0]
    known: dict = {}
    alone = measured_costs(model, device, store, fates=False, earlier=known)
    runs = [known[forward_program(made).key] for made in layer_programs(store, model)]
    beside = measured_costs(
        model, device, store, fates=False, earlier=known, devices_per_core=100.0
    )
    assert [layer.forward_s for layer in alone.layers] == [run.seconds for run in runs]
    assert [layer.forward_s for layer in beside.layers] == [100 * run.processor_s for run in runs]


def test_what_is_estimated_is_as_slow_beside_busy_devices_as_what_is_measured() -> None:
    model, store, device = traced("mlp"), shared_store(), jax.devices()[0]
    known = {}
    measured_costs(model, device, store, fates=False, earlier=known)
    del known[forward_program(layer_programs(store, model)[0]).key]
    known = {key: replace(run, processor_s=run.seconds) for key, run in known.items()}
    alone, beside = (
        measured_costs(
            model, device, store, fates=False, earlier=known, room_bytes=0, devices_per_core=busy
        )
        for busy in (0.0, 3.0)
    )
    for a, b in zip(alone.layers, beside.layers, strict=True):
        assert b.forward_s == pytest.approx(3 * a.forward_s)


def test_halves_of_backwards_are_measured_if_somebody_asks() -> None:
    """What W still reads: of tanh(x @ w + b) the cotangent, x, and the product, all of one size;
    nothing is handed.
    """
    model, store, device = traced("mlp"), ProgramStore(), jax.devices()[0]
    known = {}
    whole = measured_costs(model, device, store, fates=False, earlier=known)
    asked = len(known)
    halved = measured_costs(model, device, store, fates=False, split=True, earlier=known)
    alike = len({id(made) for made in layer_programs(store, model) if made.halves})
    assert len(known) == asked + 2 * alike
    assert all(layer.split is None for layer in whole.layers)
    assert halved.layers[0].split is None
    for layer in halved.layers[1:-1]:
        assert layer.split is not None
        assert min(layer.split.input_s, layer.split.weight_s) > 0
        assert (layer.split.handed_bytes, layer.split.kept_bytes) == (0, 3 * 4 * B * D)


def test_half_of_the_candidates_is_every_other_one() -> None:
    assert kept_names("abcde", "half") == "ace"
    assert not kept_names(["a"], "nothing")
