"""What idle devices lend: CPU devices share workers, a program on trial tells how much."""

from pathlib import Path

import jax
import pytest

from jvpipe.cost.archive import Archive
from jvpipe.cost.lending import devices_per_core, lent_share, measured_lending
from jvpipe.programs.store import Program, ProgramStore


@pytest.mark.parametrize(
    ("together_s", "devices", "share"),
    [(1.0, 2, 0.0), (0.9, 2, 0.0), (1.5, 2, 0.5), (3.0, 2, 1.0), (2.5, 4, 0.5)],
)
def test_the_share_is_by_how_much_longer_all_take_than_one(
    together_s: float, devices: int, share: float
) -> None:
    assert lent_share(1.0, together_s, devices) == share


def test_devices_share_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert devices_per_core(jax.devices()[:2]) == 0.5
    assert devices_per_core([]) == 0.0


def test_all_cores_count_where_no_system_tells_which_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert devices_per_core(jax.devices()[:2]) == 0.5


def test_it_is_measured_once_and_one_device_lends_nothing(tmp_path: Path) -> None:
    closed = jax.make_jaxpr(lambda x: (x @ x,))(jax.numpy.ones((64, 64)))
    program, store, archive = Program.of(closed, key="square"), ProgramStore(), Archive(tmp_path)
    share = measured_lending(store, program, jax.devices()[:2], archive)
    assert 0 <= share <= 1
    assert measured_lending(store, program, jax.devices()[:2], archive) == share
    assert len(list(tmp_path.iterdir())) == 1
    assert measured_lending(store, program, jax.devices()[:1]) == 0.0
