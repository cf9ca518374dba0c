"""Checkpoints that somebody changed and sealed anew: each is refused in one line that says what is
wrong, and where.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import jvpipe
from jvpipe.runtime.state.checkpoints.generations import file_digest, newest
from tests.session.tiny import BATCH, PARAMS, pipeline

Meta = dict[str, Any]
Change = Callable[[Meta], Any]
CHANCES = 60
ODD: list[Any] = [
    *(None, True, -1, 0, 3, 2**31, 10**30, 0.5, float("nan"), float("inf")),
    *("", "x", "parameter", "key<x>", [], [[]], ["x"], [-1], [None], {}, {"x": 1}, {"leaf": 3}),
]


def made(**options: Any) -> jvpipe.Pipeline:
    return pipeline(optimizer=optax.adam(0.1), **options)


def saved(folder: Path, schedule: str) -> Path:
    pipe = made(schedule=schedule)
    state = pipe.init(PARAMS, BATCH, jax.random.key(0))
    for now, _ in pipe.run(state, [BATCH] * 2):
        state = now
    pipe.save(folder, state, extra={"a": 1})
    return folder


@pytest.fixture(scope="module")
def at_rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("rest") / "state", "1f1b")


@pytest.fixture(scope="module")
def flying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("flight") / "state", "pipedream")


def seal(folder: Path) -> None:
    """Makes the digests those of the files as they are."""
    generation = newest(folder)
    assert generation is not None
    files = [path for path in generation.iterdir() if path.name != "digests.json"]
    told = {path.name: file_digest(path) for path in files}
    (generation / "digests.json").write_text(json.dumps(told))


def changed(whole: Path, folder: Path, change: Change) -> Path:
    """A copy whose meta.json is another, sealed anew."""
    shutil.copytree(whole, folder)
    file = folder / "generation-000001" / "meta.json"
    meta = json.loads(file.read_text())
    returned = change(meta)
    file.write_text(json.dumps(meta if returned is None else returned))
    seal(folder)
    return folder


def with_arrays(whole: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """A copy whose arrays are others, sealed anew."""
    shutil.copytree(whole, folder)
    file = folder / "generation-000001" / "arrays.safetensors"
    arrays = load_file(file)
    change(arrays)
    save_file(arrays, file)
    seal(folder)
    return folder


def refused(folder: Path, schedule: str, pipe: jvpipe.Pipeline | None = None) -> str:
    """The line with which a new pipeline refuses it."""
    with pytest.raises(ValueError) as caught:
        (pipe or made(schedule=schedule)).restore(folder)
    told = str(caught.value)
    assert "\n" not in told
    assert len(told) < 600
    assert folder.name in told
    return told


def put(*path: Any, value: Any) -> Change:
    """Puts a value into what meta.json holds."""

    def change(meta: Meta) -> None:
        inner: Any = meta
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value

    return change


def lacking(*path: Any) -> Change:
    """Takes an entry out of what meta.json holds."""

    def change(meta: Meta) -> None:
        inner: Any = meta
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]

    return change


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


AT_REST: dict[str, tuple[Change, str]] = {
    **{
        f"no {name}": (lacking(name), f"meta.json lacks {name}")
        for name in ("step", "updates", "words", "key", "shapes", "extra", "kinds")
    },
    "a list": (lambda meta: [meta], "meta.json: must be a mapping of names, not"),
    "a step below 0": (put("step", value=-1), "meta.json.step must be a whole number from 0"),
    "a step that is no number": (put("step", value=float("nan")), r"step must be .*, not nan"),
    "a step that is a text": (put("step", value="2"), "step must be .*, not '2'"),
    "a huge step": (put("step", value=2**40), "step must be .*, not 1099511627776"),
    "a step that is true": (put("step", value=True), "step must be .*, not True"),
    "half an update": (put("updates", value=0.5), "updates must be a whole number"),
    "words of another length": (put("words", value=[0] * 3), "do not fit the key"),
    "words below 0": (put("words", value=[0, -1]), r"words\[1\] must be a whole number"),
    "words and no key": (put("key", value=None), "do not fit the key"),
    "another key": (put("key", value=[[2], "md5"]), r"key\[1\] must be one of threefry2x32"),
    "half a key": (put("key", value=[[2]]), "key must be a list of 2"),
    "a key of another kind": (put("key", value=[[2], "rbg"]), "rbg"),
    "extra that is a list": (put("extra", value=[]), "extra must be a mapping of names"),
    "an unknown entry": (put("more", value=1), "has an unknown entry, 'more'"),
    "shapes of nothing": (put("shapes", value={}), "shapes lacks params"),
    "an unknown container": (put("shapes", "batch", value={"set": []}), "must be one of dict"),
    "two containers": (
        put("shapes", "batch", value={"list": [], "tuple": []}),
        "shapes.batch must be one of dict",
    ),
    "a leaf of no type": (
        put("shapes", "params", "list", 0, "leaf", value=[[2, 2], "float7"]),
        "must be a type, not 'float7'",
    ),
    "a leaf of no shape": (
        put("shapes", "params", "list", 0, "leaf", value=[[-2, 2], "float32"]),
        "must be a whole number from 0",
    ),
    "another shape": (
        put("shapes", "params", "list", 0, "leaf", value=[[2, 3], "float32"]),
        "cannot begin here: dot_general",
    ),
    "a leaf too few": (
        lacking("shapes", "params", "list", 2),
        r"cannot begin here: the plan's stages have layers",
    ),
    "a huge leaf": (
        put("shapes", "params", value={"list": [{"leaf": [[2**40, 2**40], "float32"]}]}),
        "cannot begin here",
    ),
    "a node of no class": (
        put("shapes", "params", value={"node": ["optax:No", None, []]}),
        "import that before restore",
    ),
    "a node of a class that is none": (
        put("shapes", "params", value={"node": ["json:loads", None, []]}),
        "'json:loads' is not a class of containers",
    ),
    "containers that nest": (
        put("shapes", "params", value={"list": nested(500)}),
        "more than 200 deep",
    ),
    "nesting without end": (put("extra", value={"a": nested(900)}), "more than 200 deep"),
    "no kinds": (put("kinds", value=[]), "is of no kind"),
    "kinds that are numbers": (put("kinds", value=[1]), r"kinds\[0\] must be a text"),
    "keys that are not there": (
        put("keys", value=[["parameter", "9", "rbg"]]),
        "there is no parameter '9'",
    ),
    "keys that are none": (
        put("keys", value=[["parameter", "0", "rbg"]]),
        r"parameter '0' is float32\[2, 2\], and no key<rbg>",
    ),
    "bytes of no type": (put("raw", value=[["parameter", "0", "x", []]]), "must be a type"),
    "bytes of another length": (
        put("raw", value=[["parameter", "0", "int4", [3]]]),
        "and no int4",
    ),
    "a part elsewhere": (put("parts", value={"../x": []}), "is not a file in its folder"),
    "a part that is gone": (put("parts", value={"x": []}), "x is gone"),
    "a part without its arrays": (
        put("parts", value={"arrays.safetensors": ["parameter/9"]}),
        "parameter/9|no parameter '0'",
    ),
    "in flight without arrays": (put("flight", value={}), "flight lacks steps"),
}
"""What is changed of a state at rest, and what is said of it."""


def flight(*path: Any, value: Any) -> Change:
    return put("flight", *path, value=value)


IN_FLIGHT: dict[str, tuple[Change, str]] = {
    "not told": (lacking("flight"), "flight is missing"),
    "of no kind": (lambda meta: meta["kinds"].remove("flight"), "flight has no arrays"),
    **{
        f"no {name}": (lacking("flight", name), f"flight lacks {name}")
        for name in ("steps", "bound_to", "legs", "versions")
    },
    "no steps": (flight("steps", value=0), "steps must be a whole number from 1"),
    "more steps than were done": (flight("steps", value=3), "3 steps under 1 plans are in flight"),
    "no plans": (flight("legs", value=[]), "0 plans are in flight"),
    "half a plan": (flight("legs", 0, 1, value={}), "a plan lacks stages"),
    "a plan of other layers": (
        flight("legs", 0, 1, "stages", 0, "layers", value=[0]),
        "names layer 2, the plan has 2",
    ),
    "plans in another order": (
        lambda meta: meta["flight"]["legs"].append(meta["flight"]["legs"][0]),
        "not in turn",
    ),
    "bound to nothing": (flight("bound_to", value=[]), "bound_to must be a list of 5"),
    "versions of nothing": (flight("versions", value={}), "versions lacks complete"),
    "a use of no task": (flight("versions", "runs", 0, 0, 0, 0, value="X"), "must be one of F, B"),
    "a use of nothing": (flight("versions", "runs", 0, 0, 0, value=[]), "must be a list of 6"),
    "a use of no layer": (
        flight("versions", "runs", 0, 0, 0, 1, value=99),
        "names layer 99, the plan has 3",
    ),
    "arrays of another kind": (
        lambda meta: meta["kinds"].append("flights"),
        r"kinds\[4\] must be one of parameter",
    ),
}


@pytest.mark.parametrize("what", AT_REST)
def test_a_state_at_rest_that_is_not_as_it_was(what: str, at_rest: Path, tmp_path: Path) -> None:
    change, told = AT_REST[what]
    line = refused(changed(at_rest, tmp_path / "state", change), "1f1b")
    assert re.search(told, line), line


@pytest.mark.parametrize("what", IN_FLIGHT)
def test_a_state_in_flight_that_is_not_as_it_was(what: str, flying: Path, tmp_path: Path) -> None:
    change, told = IN_FLIGHT[what]
    line = refused(changed(flying, tmp_path / "state", change), "pipedream")
    assert re.search(told, line), line


ARRAYS: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "one is gone": (lambda arrays: arrays.pop("parameter/1"), "it has no parameter '1'"),
    "one more": (
        lambda arrays: arrays.update({"parameter/7": np.zeros(2)}),
        "this one has no parameter '7'",
    ),
    "of no kind": (lambda arrays: arrays.update(x=np.zeros(2)), "'x' is of no kind"),
    "of another shape": (
        lambda arrays: arrays.update({"parameter/1": np.zeros((2, 3), np.float32)}),
        r"parameter '1' is float32\[2, 3\]",
    ),
    "of another type": (
        lambda arrays: arrays.update({"parameter/1": np.zeros((2, 2), np.int32)}),
        r"parameter '1' is int32\[2, 2\]",
    ),
    "of the optimizer": (
        lambda arrays: arrays.pop(next(name for name in arrays if name.startswith("optimizer"))),
        r"of another optimizer: it has no array.*; are other parameters frozen \(--frozen, frozen=",
    ),
}
"""What is changed of the arrays of a state at rest, and what is said of it."""


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_that_are_not_as_they_were(what: str, at_rest: Path, tmp_path: Path) -> None:
    change, told = ARRAYS[what]
    line = refused(with_arrays(at_rest, tmp_path / "state", change), "1f1b")
    assert re.search(told, line), line


@pytest.mark.parametrize("kind", ["residual", "tensor", "parameter", "optimizer"])
@pytest.mark.parametrize("damage", ["shape", "type", "gone"])
def test_arrays_in_flight_that_are_not_as_they_were(
    kind: str, damage: str, flying: Path, tmp_path: Path
) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        name = next(name for name in arrays if name.startswith(f"flight/{kind}"))
        if damage == "gone":
            del arrays[name]
        else:
            other = np.zeros(arrays[name].shape, np.uint32)  # no optimizer has any such state
            arrays[name] = other if damage == "type" else arrays[name].reshape(-1)[:1]

    line = refused(with_arrays(flying, tmp_path / "state", change), "pipedream")
    assert kind in line


def test_files_that_are_none(at_rest: Path, tmp_path: Path) -> None:
    for name, content in (("arrays.safetensors", b"x" * 50), ("meta.json", b"[" * 10**5)):
        folder = tmp_path / name
        shutil.copytree(at_rest, folder)
        (folder / "generation-000001" / name).write_bytes(content)
        seal(folder)
        assert f"is damaged: {name}: " in refused(folder, "1f1b")
    for content in ("[" * 10**5, '{"meta.json": 3}', "[1]", '{"meta.json": {}}'):
        (folder / "generation-000001" / "digests.json").write_text(content)
        assert "is damaged: digests.json" in refused(folder, "1f1b")


def places(meta: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in what JSON holds."""
    listed = enumerate(meta) if isinstance(meta, list) else ()
    for name, value in meta.items() if isinstance(meta, dict) else listed:
        yield (*path, name)
        yield from places(value, (*path, name))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_what_chance_puts_anywhere_is_taken_or_refused(
    schedule: str, at_rest: Path, flying: Path, tmp_path: Path
) -> None:
    chance, told = random.Random(7), list[str]()
    folder = at_rest if schedule == "1f1b" else flying
    meta = json.loads((folder / "generation-000001" / "meta.json").read_text())
    there = [place for place in places(meta) if place[0] != "extra"]
    for n in range(CHANCES):
        place = chance.choice(there)
        change = put(*place, value=chance.choice(ODD))
        changed(folder, tmp_path / str(n), lacking(*place) if chance.random() < 0.2 else change)
        try:
            pipe = made(schedule=schedule)
            for _ in pipe.run(pipe.restore(tmp_path / str(n)), [BATCH]):
                pass
        except (ValueError, jvpipe.MemoryLimitExceeded) as error:
            told.append(str(error))
        except Exception as error:
            raise AssertionError((place, schedule)) from error
    assert len(told) > CHANCES // 2
    assert not [line for line in told if "\n" in line]
