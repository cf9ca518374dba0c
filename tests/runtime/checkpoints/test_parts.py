"""Several processes write one checkpoint, whole or not at all; what is read of it is what each of
them held.
"""

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.runtime.engine.disagreement import Disagreement
from jvpipe.runtime.engine.failures import HostLost
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.state.checkpoints import generations
from jvpipe.runtime.state.checkpoints.checkpoint import (
    checkpoint_extra,
    open_checkpoint,
    save_checkpoint,
)
from jvpipe.runtime.state.checkpoints.generations import DamageError
from jvpipe.runtime.state.checkpoints.process_parts import open_together, save_parts
from tests.moments import copied_at_every_operation
from tests.runtime.test_hosts import Store
from tests.saved import load_checkpoint

META = {"step": 1, "extra": {"data": 3}}


class KilledError(BaseException):
    """Stands for a kill -9: nobody handles it."""


class DyingStore(Store):
    """Kills a process when it is about to say its `word`-th word; who waits for more of it is
    told.
    """

    def __init__(self, process: int, word: int) -> None:
        super().__init__()
        self.process, self.left = process, word

    def key_value_set(self, key: str, value: str) -> None:
        with self._told:
            if key.endswith(f"/{self.process}"):
                self.left -= 1
                if self.left < 0:
                    self._told.notify_all()
                    raise KilledError
        super().key_value_set(key, value)

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        def lost() -> bool:
            return self.left < 0 and key.endswith(f"/{self.process}") and key not in self._values

        with self._told:
            self._told.wait_for(lambda: lost() or key in self._values, timeout_ms / 1000)
            if lost():
                raise RuntimeError("UNAVAILABLE: it is dead")
        return super().blocking_key_value_get(key, timeout_ms)


def outcomes(count: int, act: Callable[[Hosts], Any], store: Store | None = None) -> list[Any]:
    """What every process gets of an act, or what it ends with."""
    shared = store or Store()

    def run(process: int) -> Any:
        try:
            return act(Hosts(process, count, shared, timeout_s=10.0))
        except BaseException as end:
            return end

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def held(process: int, value: float) -> dict[str, dict[str, Any]]:
    """What a process holds of a model."""
    return {"parameter": {f"layer{process}/w": np.full((3, 4), value, np.float32)}, "state": {}}


def saved_by(count: int, path: Path, value: float, **options: Any) -> list[Any]:
    return outcomes(
        count, lambda hosts: save_parts(hosts, path, held(hosts.process, value), META), **options
    )


def value_in(path: Path) -> float:
    """The value that all arrays of a checkpoint have; it must be whole."""
    parameters = load_checkpoint(path)[0]["parameter"]
    assert sorted(parameters) == ["layer0/w", "layer1/w"]
    (value,) = {float(x) for array in parameters.values() for x in array.flat}
    return value


def assert_same(told: Any, expected: Any) -> None:
    assert (told.shape, told.dtype) == (expected.shape, expected.dtype)
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        told, expected = jax.random.key_data(told), jax.random.key_data(expected)
    np.testing.assert_array_equal(told, expected)


def test_every_array_of_every_process_comes_back_from_the_part_of_its_process(
    tmp_path: Path,
) -> None:
    some = np.random.default_rng(0).random((4, 6)).astype(np.float32)
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    mine = [
        {"parameter": {"a/b": some, "": some[0, 0]}, "optimizer": {"key": keys}},
        {"parameter": {}, "optimizer": {}},
        {
            "parameter": {"c": some.astype(jnp.bfloat16), "d": some.astype(jnp.int4)},
            "optimizer": {"n": some[:0]},
        },
    ]
    assert (
        outcomes(3, lambda hosts: save_parts(hosts, tmp_path, mine[hosts.process], META))
        == [None] * 3
    )
    arrays, meta = load_checkpoint(tmp_path)
    for kind in ("parameter", "optimizer"):
        expected = {name: x for part in mine for name, x in part[kind].items()}
        assert arrays[kind].keys() == expected.keys()
        for name, x in expected.items():
            assert_same(arrays[kind][name], x)
    assert checkpoint_extra(tmp_path) == META["extra"]
    assert {file: set(names) for file, names in meta["parts"].items()} == {
        "part-0000.safetensors": {"parameter/a/b", "parameter/", "optimizer/key"},
        "part-0001.safetensors": set(),
        "part-0002.safetensors": {"parameter/c", "parameter/d", "optimizer/n"},
    }
    saved = open_checkpoint(tmp_path)
    assert saved.generation is not None
    (saved.generation / "part-0000.safetensors").unlink()
    some_alone = saved.read({("parameter", "d"), ("optimizer", "n")})
    assert some_alone["parameter"].keys() == arrays["parameter"].keys(), "the names of all are told"
    assert {
        name for named in some_alone.values() for name, x in named.items() if x is not None
    } == {"d", "n"}
    assert_same(some_alone["parameter"]["d"], mine[2]["parameter"]["d"])
    generations.delete(tmp_path)
    assert not tmp_path.exists()


def test_of_one_file_too_some_arrays_are_read_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, held(0, 1.0) | {"state": {"key": jax.random.key(0)}}, META)
    told = open_checkpoint(tmp_path).read({("parameter", "layer0/w")})
    assert told["state"] == {"key": None}
    assert_same(told["parameter"]["layer0/w"], held(0, 1.0)["parameter"]["layer0/w"])


def test_whenever_a_process_is_killed_the_older_or_the_new_one_is_whole(tmp_path: Path) -> None:
    def killed(at: tuple[int, int]) -> float:
        process, word = at
        folder = tmp_path / f"{process}-{word}"
        assert saved_by(2, folder, 1.0) == [None, None]
        ends = saved_by(2, folder, 2.0, store=DyingStore(process, word))
        assert isinstance(ends[process], KilledError)
        assert isinstance(ends[1 - process], HostLost), "who lives on is told"
        value = value_in(folder)
        assert saved_by(2, folder, 3.0) == [None, None], (
            "what the dead left is no obstacle, and goes"
        )
        assert value_in(folder) == 3.0
        assert len(list(folder.iterdir())) == 1
        return value

    moments = [(process, word) for process in (0, 1) for word in range(5)]
    with ThreadPoolExecutor(len(moments)) as pool:
        values = dict(zip(moments, pool.map(killed, moments), strict=True))
    assert values == {at: 2.0 if at[1] == 4 else 1.0 for at in moments}, (
        "the last word is said after the renaming"
    )


def test_at_every_operation_on_files_the_older_or_the_new_one_is_whole(tmp_path: Path) -> None:
    folder, copies = tmp_path / "there" / "saved", tmp_path / "copies"
    saved_by(2, folder, 1.0)
    with copied_at_every_operation(folder.parent, copies):
        assert saved_by(2, folder, 2.0) == [None, None]
    values = [value_in(moment / "saved") for moment in sorted(copies.iterdir())]
    assert len(values) > 12
    assert values == sorted(values)
    assert set(values) == {1.0, 2.0}


def test_a_disk_that_is_full_for_one_is_told_by_all_and_the_older_one_stays(tmp_path: Path) -> None:
    saved_by(2, tmp_path, 1.0)
    noise = {"parameter": {"w": np.random.default_rng(0).random((100, 100))}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        ends = outcomes(
            2, lambda h: save_parts(h, tmp_path, noise if h.process else held(0, 2.0), META)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [type(end) for end in ends] == [Disagreement, OSError]
    assert str(ends[0]).startswith(
        f"process 1 says: OSError: cannot write the checkpoint {tmp_path}: "
    )
    assert value_in(tmp_path) == 1.0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_not_all_see_is_named_and_nothing_is_saved(tmp_path: Path) -> None:
    paths = [tmp_path / "here", tmp_path / "there"]
    ends = outcomes(
        2, lambda hosts: save_parts(hosts, paths[hosts.process], held(hosts.process, 1.0), META)
    )
    assert all(f"{paths[1]} is another folder in process 1" in str(end) for end in ends)
    (paths[1] / "generation-000001.draft").mkdir(
        parents=True
    )  # such as a save that was killed leaves there
    ends = outcomes(
        2, lambda hosts: save_parts(hosts, paths[hosts.process], held(hosts.process, 1.0), META)
    )
    assert all(f"{paths[0]} is another folder in process 1" in str(end) for end in ends)
    assert list(paths[0].iterdir()) == []


def test_a_file_in_the_way_is_told_by_all(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    ends = saved_by(2, tmp_path / "notes", 1.0)
    assert all(
        "notes is a file, and a checkpoint is a folder: save under another name" in str(end)
        for end in ends
    )


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("writers", [1, 2])
def test_damage_to_any_file_is_told_alike_by_all(
    writers: int, readers: int, tmp_path: Path
) -> None:
    if writers == 1:
        save_checkpoint(tmp_path, held(0, 1.0), META)
    else:
        saved_by(writers, tmp_path, 1.0)

    def opened(hosts: Hosts) -> str:
        return open_together(hosts if hosts.count > 1 else None, tmp_path).folder.name

    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == writers + 2
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        ends = outcomes(readers, opened)
        assert all(isinstance(end, DamageError) for end in ends)
        (told,) = set(map(str, ends))
        assert told.startswith(f"{tmp_path} is damaged: ")
        assert path.name in told
        with pytest.raises(DamageError):
            generations.check_generation(path.parent)
        path.write_bytes(content)
    assert outcomes(readers, opened) == [tmp_path.name] * readers


def test_processes_that_read_different_checkpoints_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "0" / "saved", tmp_path / "1" / "saved"]
    for i, path in enumerate(paths):
        save_checkpoint(path, held(0, 1.0), META | {"step": i})
    ends = outcomes(2, lambda hosts: open_together(hosts, paths[hosts.process]))
    assert all(
        str(end).startswith("the checkpoints differ between processes: meta.json is ")
        for end in ends
    )
    generations.delete(paths[1])
    for _ in range(2):  # the second content is the same, but a newer generation
        save_checkpoint(paths[1], held(0, 1.0), META | {"step": 0})
    ends = outcomes(2, lambda hosts: open_together(hosts, paths[hosts.process]))
    assert all(
        str(end).startswith("the checkpoints differ between processes: generation is ")
        for end in ends
    )
    generations.delete(paths[1])
    ends = outcomes(2, lambda hosts: open_together(hosts, paths[hosts.process]))
    assert str(ends[0]) == f"process 1 says: {paths[1]} holds no checkpoint that jvpipe saved"
