"""A folder's content is replaced whole, whenever the process dies, and what is not as it was is
noticed.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from jvpipe.runtime.state.checkpoints import generations
from jvpipe.runtime.state.checkpoints.generations import DamageError, newest
from tests.moments import copied_at_every_operation


def write(folder: Path, text: str) -> None:
    with generations.draft(folder) as draft:
        (draft / "inner").mkdir(parents=True)
        (draft / "a.txt").write_text(text)
        (draft / "inner" / "b.txt").write_text(text * 2)


def read(folder: Path) -> str:
    generation = newest(folder)
    assert generation is not None
    generations.check_generation(generation)
    return (generation / "a.txt").read_text()


def test_whenever_the_process_dies_the_old_or_the_new_is_whole(tmp_path: Path) -> None:
    folder, copies = tmp_path / "kept", tmp_path / "copies"
    write(folder, "old")
    with copied_at_every_operation(folder, copies):
        write(folder, "new")
    seen = [read(moment) for moment in sorted(copies.iterdir())]
    assert len(seen) > 20
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"}
    for moment in copies.iterdir():  # what the dead process left is no obstacle, and goes
        write(moment, "later")
        assert read(moment) == "later"
        assert len(list(moment.iterdir())) == 1


def test_a_draft_that_fails_leaves_what_there_was(tmp_path: Path) -> None:
    write(tmp_path, "old")

    def fail() -> None:
        with generations.draft(tmp_path) as draft:
            draft.mkdir()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert read(tmp_path) == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_new_name_that_is_not_forced_to_the_disk_leaves_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "old")
    force = generations.sync

    def sync(path: Path) -> None:
        if path == tmp_path:
            raise OSError("no room")
        force(path)

    monkeypatch.setattr(generations, "sync", sync)
    with pytest.raises(OSError, match="no room"):
        write(tmp_path, "new")
    assert read(tmp_path) == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["flip", "tear", "remove", "digest", "no digests"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path, "old")
    generation = newest(tmp_path)
    assert generation is not None
    path, digests = generation / "inner" / "b.txt", generation / "digests.json"
    if damage == "flip":
        path.write_text("olcold")
    elif damage == "tear":
        path.write_text("old")
    elif damage == "remove":
        path.unlink()
    elif damage == "digest":
        digests.write_text(digests.read_text().replace("}", "]"))
    else:
        digests.unlink()
    with pytest.raises(
        DamageError, match=r"digests\.json" if "dig" in damage else r"inner/b\.txt is"
    ):
        generations.check_generation(generation)


def test_what_is_somebody_elses_stays(tmp_path: Path) -> None:
    write(tmp_path, "old")
    for name in ("notes.txt", "generation-x.txt"):
        (tmp_path / name).write_text("mine")
    write(tmp_path, "new")
    generations.delete(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["generation-x.txt", "notes.txt"]


def test_whenever_a_deletion_is_cut_short_nothing_half_counts(tmp_path: Path) -> None:
    folder, copies = tmp_path / "kept", tmp_path / "copies"
    write(folder, "old")
    with copied_at_every_operation(folder, copies):
        generations.delete(folder)
    assert not folder.exists()
    whole = [
        newest(moment) is not None and read(moment) == "old" for moment in sorted(copies.iterdir())
    ]
    assert whole == sorted(whole, reverse=True)
    assert {True, False} == {newest(moment) is not None for moment in copies.iterdir()}


def test_what_cannot_be_deleted_is_told_once_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, rmtree = tmp_path / "kept", shutil.rmtree

    def busy(path: Path, **given: Any) -> None:
        if path.name != "generation-000003":
            raise OSError(39, "Directory not empty")
        rmtree(path, **given)

    with caplog.at_level(logging.WARNING, "jvpipe"), monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        for text in ("first", "second", "third", "fourth"):
            write(folder, text)
            assert read(folder) == text
        generations.delete(folder)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told))
    assert f"{folder / 'generation-000001'} cannot be deleted (Directory not empty)" in told[0]
    assert newest(folder) is None, "half a generation is none"
    write(folder, "later")
    assert read(folder) == "later"
    assert len(list(folder.iterdir())) == 1


def test_a_draft_that_cannot_be_deleted_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation-000001.draft").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("busy")))
    write(tmp_path, "new")
    assert read(tmp_path) == "new"


def test_what_lies_behind_a_link_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "moved", "old")
    (tmp_path / "kept").symlink_to(tmp_path / "moved")
    with caplog.at_level(logging.WARNING, "jvpipe"):
        generations.delete(tmp_path / "kept")
        generations.delete(tmp_path / "kept")
    assert read(tmp_path / "kept") == "old"
    (told,) = caplog.records
    assert f"{tmp_path / 'kept'} cannot be deleted (it is a link)" in told.getMessage()
