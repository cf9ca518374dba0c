"""What a picture of a measured step shows is what the ledger counted and what the lists sent."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

import jvpipe
from jvpipe.ir.kinds import Kind
from jvpipe.ir.span import Picture
from tests.end_to_end.test_exactness import batch_of
from tests.runtime.test_migrate import MICRO, started
from tests.zoo import CASES

PLAN = jvpipe.Plan.from_cuts([2, 3])


def drawn(
    schedule: str = "1f1b", steps: int = 3, **options: Any
) -> tuple[jvpipe.Pipeline, list[Picture]]:
    m = CASES["mlp"]()
    pipe, state = started(m, PLAN, schedule, **options)
    pipe.session.monitor(kept=steps)
    for _ in range(steps):
        state, _ = pipe.step(state, batch_of(m, MICRO))
    return pipe, pipe.session.pictures(steps)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("1f1b", {"fates": {"*": "swap"}}),
        ("1f1b", {"fates": {"*": "recompute"}}),
        ("pipedream", {}),
    ],
)
def test_the_most_bytes_are_the_peak_of_the_ledger(schedule: str, options: dict[str, Any]) -> None:
    pipe, pictures = drawn(schedule, **options)
    most: dict[str, int] = {}
    for picture in pictures:
        by_place: dict[str, list[tuple[float, int]]] = {}
        for place, at_s, held in picture.levels:
            by_place.setdefault(place, []).append((at_s, held))
        for place, levels in by_place.items():
            assert all(earlier <= later for (earlier, _), (later, _) in pairwise(levels))
            most[place] = max(most.get(place, 0), *(held for _, held in levels))
    peaks = {str(device): peak for device, peak in pipe.ledger.peak_bytes.items()}
    assert most == {
        name: peak for name, peak in (peaks | {"host": pipe.ledger.host_peak_bytes}).items() if peak
    }
    assert ("host" in most) == (options.get("fates") == {"*": "swap"})


def test_a_level_is_what_is_held_where_a_step_ends() -> None:
    pipe, (*_, picture) = drawn()
    last = {place: held for place, _, held in picture.levels}
    metrics = sum(
        b.bytes
        for b in (
            pipe.session.compiled.lowered.buffers[i] for i in pipe.session.compiled.lowered.metrics
        )
    )
    assert sum(last.values()) == sum(pipe.ledger.live) + metrics


def test_each_copy_leaves_what_made_it_and_arrives_where_it_is_read() -> None:
    pipe, (*_, picture) = drawn()
    first, second = (str(device) for device in pipe.session.settings.devices[:2])
    ends: dict[str, dict[bool, tuple[str, float]]] = {}
    for hop in picture.hops:
        ends.setdefault(hop.key, {})[hop.arrives] = hop.device, hop.at_s
    links = Counter((both[False][0], both[True][0]) for both in ends.values() if len(both) == 2)
    assert links[first, second] >= MICRO  # activations; losses are summed elsewhere too
    assert links[second, first] >= MICRO  # their gradients
    spans = {
        device: [(s.start_s, s.end_s) for s in picture.spans if s.device == device]
        for device in (first, second)
    }
    for hop in picture.hops:
        assert any(start_s <= hop.at_s <= end_s for start_s, end_s in spans[hop.device])


def test_tasks_have_the_names_of_their_layers() -> None:
    pipe, (picture, *_) = drawn(steps=1)
    labels = [pipe.session.graph.label(layer) for layer in pipe.session.graph.layers]
    named = {
        span.args["layer"]: span.args["layer_name"] for span in picture.spans if span.kind is Kind.F
    }
    assert named == dict(enumerate(labels))


def test_an_evaluation_is_no_step() -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, PLAN)
    pipe.session.monitor()
    state, _ = pipe.step(state, batch_of(m, MICRO))
    pipe.evaluate(state, batch_of(m, MICRO))
    (picture,) = pipe.session.pictures(5)
    assert {Kind.F, Kind.B, Kind.U} <= {span.kind for span in picture.spans}
    assert Kind.E not in {span.kind for span in pipe.session.measured().spans}


def test_micro_batches_of_earlier_steps_of_a_stream_are_named_as_in_their_own_step() -> None:
    _, pictures = drawn("pipedream")
    backwards = [span for picture in pictures for span in picture.spans if span.kind is Kind.B]
    for span in backwards:
        assert span.args["microbatch"] in range(MICRO)
        assert span.name.endswith(f"B{span.args['microbatch']}")
    late = {(span.name, span.args["steps_ago"]) for span in backwards if "steps_ago" in span.args}
    assert late == {(f"0B{MICRO - 1}", 1)}
    updates = [span for picture in pictures for span in picture.spans if span.kind is Kind.U]
    late = {(span.name, span.args["steps_ago"]) for span in updates if "steps_ago" in span.args}
    assert late == {(f"0U{MICRO - 1}", 1)}


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_a_drain_is_shown_with_its_step_and_is_no_step(schedule: str) -> None:
    # Each call of `step` drains the stream.
    _, pictures = drawn(schedule, steps=2)
    kinds = [{span.kind for span in picture.spans} for picture in pictures]
    assert [Kind.F in of_picture for of_picture in kinds] == [True, False, True, False]
