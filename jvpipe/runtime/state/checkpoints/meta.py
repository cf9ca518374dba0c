"""Checks the entries of a checkpoint's `meta.json` before they are used.

A checkpoint comes from outside the program, so any entry may be wrong. Each is compared with a
pattern (`jvpipe.util.pattern`), and an error names the first wrong entry. The patterns are also the
description of the format. An entry that is added later must be optional (its name ends with "?"),
because older checkpoints must still match.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.runtime.state.checkpoints import skeleton
from jvpipe.trace.keys import IMPLEMENTATIONS
from jvpipe.util.pattern import LARGEST, anything, compare, maybe, one_of_texts, whole_in

_WHERE = "meta.json"
_COUNT = whole_in(0, 2**31 - 1)
_ANY = whole_in(-LARGEST)
"""Any integer, for micro-batches and versions in the ledger (`engine/versions.py`). They are
counted from the start of a step, so those of earlier steps are negative."""
_USE = (
    one_of_texts((Kind.F, Kind.B, Kind.U)),
    _COUNT,
    _ANY,
    _ANY,
    [(_COUNT, _ANY)],
    _ANY,
)
"""An entry of the ledger of versions (`Use`): kind, layer, micro-batch, version, tied versions,
shift."""
# A run has the uses of a step, and what to add to their micro-batches and versions. None stands for
# a drain (`versions.py`).
_VERSIONS = {"complete": bool, "runs": [maybe(([_USE], _ANY, _ANY))]}
# The kinds; the arrays that need a conversion (`Packed`); and the arrays of each part.
_ARRAYS = {
    "kinds": [str],
    "keys": [(str, str, one_of_texts(IMPLEMENTATIONS))],
    "raw": [(str, str, skeleton.dtype, [whole_in()])],
    "parts": {str: [str]},
}


def _plan(where: str, data: Any) -> None:
    """Raises ValueError unless data are a plan, as `Plan.to_json` writes it. Used as a pattern."""
    try:
        Plan.from_json(data)
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from problem


def _binding(where: str, data: Any) -> None:
    """Raises ValueError unless data begin with the five entries that `Saving._binding` always has.

    They are the options of the schedule, cuts, splits, fates of stages, and micro-batches per step.
    """
    compare(where, data, [anything])
    first_five = ({str: anything}, [_COUNT], [_COUNT], [{str: str}], _COUNT)
    compare(where, data[:5], first_five)
    name = data[0].get("name")
    compare(f"{where}[0]", {"name": name}, {"name": str})


def _ledger(where: str, data: Any) -> None:
    """Raises ValueError unless data are a ledger of versions. Used as a pattern."""
    # Older checkpoints have only the list of runs.
    compare(where, data, _VERSIONS["runs"] if isinstance(data, list) else _VERSIONS)


_FLIGHT = {
    "steps": whole_in(1, 2**31 - 1),  # how many steps the stream has had
    "bound_to": _binding,  # what must be the same when the state is restored
    "legs": [(_COUNT, _plan)],  # the plans of the stream, each with its first micro-batch
    "versions": _ledger,
}
_STATE = {
    "step": _COUNT,
    "updates": _COUNT,
    "words": maybe([whole_in(0, 2**32 - 1)]),
    "key": maybe(([whole_in()], maybe(one_of_texts(IMPLEMENTATIONS)))),
    "schedule?": str,
    "shapes": {name: maybe(skeleton.tree) for name in ("params", "batch", "model_state")},
    "extra": {str: anything},
    "flight?": _FLIGHT,
    "kinds": [one_of_texts(("parameter", "optimizer", "state", "flight"))],
    **{f"{name}?": anything for name in ("keys", "raw", "parts")},  # see `check_array_table`
}


def check_array_table(meta: Mapping[str, Any]) -> None:
    """Raises ValueError if an entry that lists the arrays of the checkpoint is wrong."""
    if "kinds" not in meta:
        raise ValueError(f"{_WHERE} lacks kinds")
    present = (name for name in _ARRAYS if name in meta)  # in order: an error names the first
    for name in present:
        compare(f"{_WHERE}: {name}", meta[name], _ARRAYS[name])
    for file in meta.get("parts", ()):
        if not file or "/" in file or "\0" in file or file in (".", ".."):
            raise ValueError(f"{_WHERE}: parts names {file!r}, which is not a file in its folder")


def check_state(meta: Mapping[str, Any]) -> None:
    """Raises ValueError unless `meta.json` has exactly the entries of a state, all valid."""
    compare(_WHERE, dict(meta), _STATE)
    words, key = meta["words"], meta["key"]
    # The words are the integers of the run's random key. The shape of the key says how many there
    # are. A run without a key has neither words nor a shape.
    fits = (words is None) == (key is None)
    if fits and key is not None:
        fits = len(words) == prod(key[0])
    if not fits:
        raise ValueError(f"{_WHERE}: the words {words} do not fit the key {key}")
    flight = meta.get("flight")
    has_arrays = "flight" in meta.get("kinds", ())
    if (flight is not None) != has_arrays:
        raise ValueError(f"{_WHERE}: flight {'is missing' if has_arrays else 'has no arrays'}")
    if flight is not None:
        _check_flight(flight, meta["step"])


def _check_flight(flight: Mapping[str, Any], step: int) -> None:
    """Raises ValueError if the entries about micro-batches in flight contradict each other.

    Args:
        flight: the entry about the micro-batches in flight.
        step: the step of the state.
    """
    steps, legs = flight["steps"], flight["legs"]
    if steps > step or not legs:
        raise ValueError(
            f"{_WHERE}: {steps} steps under {len(legs)} plans are in flight at step {step}"
        )
    # Every plan of a stream has all layers, so the last one tells how many there are.
    layers = sum(Plan.from_json(legs[-1][1]).cuts)
    versions = flight["versions"]
    runs = versions if isinstance(versions, list) else versions["runs"]
    used = (layer for run in runs if run for _, layer, *_ in run[0])
    beyond = next((layer for layer in used if layer >= layers), None)
    if beyond is not None:
        raise ValueError(f"{_WHERE}: flight.versions names layer {beyond}, the plan has {layers}")
    starts = [start for start, _ in legs]
    if starts != sorted(set(starts)):
        raise ValueError(f"{_WHERE}: flight.legs begin at micro-batches {starts}, not in turn")
