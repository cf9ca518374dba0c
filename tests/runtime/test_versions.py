"""The ledger of versions: what it tells of layers and micro-batches is what was recorded, from any
number of steps.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.ir.kinds import Kind
from jvpipe.ir.use import Use
from jvpipe.runtime.engine.versions import Reads, VersionLedger


def stream(layers: int, steps: int, late: int, micro: int, every: int) -> VersionLedger:
    """Steps of a stream in which backwards run `late` micro-batches after their forwards, an update
    after `every`.
    """
    ledger = VersionLedger()
    for step in range(steps):
        uses = []
        for m in range(step * micro, (step + 1) * micro):
            for layer in range(layers):
                done = max(0, m - late)
                uses.append(Use(Kind.F, layer, m, done // every))
                if m >= late:
                    uses.append(Use(Kind.B, layer, m - late, (m - late) // every))
                    if (m - late + 1) % every == 0:
                        uses.append(Use(Kind.U, layer, m - late, (m - late + 1) // every))
        ledger.record(uses, 0, 0)
    return ledger


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 5), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_the_last_staleness_is_the_tables(layers: int, steps: int, late: int, every: int) -> None:
    ledger = stream(layers, steps, late, 3 * every, every)
    found = [0] * layers
    for (layer, m), reads in sorted(ledger.table().items()):
        if reads.staleness is not None and (m + 1) % every == 0:
            found[layer] = reads.staleness
    assert ledger.staleness(layers) == tuple(found)


def test_what_happened_to_a_micro_batch() -> None:
    ledger = stream(layers=2, steps=2, late=1, micro=2, every=1)
    assert ledger[1, 0] == Reads(0, 0, 1)
    assert ledger[0, 2] == Reads(1, 2, 3)
    assert ledger[0, 3] == Reads(2, None, None), "still in flight"
    with pytest.raises(KeyError, match="micro-batch 4 has not passed layer 1"):
        ledger[1, 4]


def test_numbers_count_from_those_of_the_run() -> None:
    ledger = VersionLedger()
    ledger.record([Use(Kind.F, 0, 0, 0), Use(Kind.B, 0, 0, 0), Use(Kind.U, 0, 0, 1)], 6, 3)
    ledger.drained()
    assert ledger.table() == {(0, 6): Reads(3, 3, 4)}
    assert ledger.staleness(2) == (0, 0)
    assert VersionLedger.from_json(ledger.to_json()).table() == ledger.table()
    assert (
        VersionLedger.from_json(ledger.to_json()["runs"]).table() == ledger.table()
    )  # as it was once saved


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 5), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_what_is_saved_knows_all_that_is_not_over(
    layers: int, steps: int, late: int, every: int
) -> None:
    ledger = stream(layers, steps, late, 3 * every, every)
    saved = VersionLedger.from_json(json.loads(json.dumps(ledger.to_json())))
    known = saved.table()
    assert all(
        known[at] == reads
        for at, reads in ledger.table().items()
        if at in known or reads.update is None
    )
    assert saved.staleness(layers) == ledger.staleness(layers)
    assert saved.complete == (known == ledger.table())


def test_what_is_saved_does_not_grow_with_the_run() -> None:
    short, long = (json.dumps(stream(3, steps, 2, 4, 1).to_json()) for steps in (6, 9))
    assert len(long) <= len(short) + 50  # some numbers have more digits
