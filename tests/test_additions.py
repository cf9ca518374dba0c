"""The pages about additions are followed on copies of the library, and each of their places is
forgotten in turn.

A forgotten place is loud if the copy cannot be imported, the addition not be used, or a named check
fails: one of `tests/test_house.py`, `tests/test_lists.py` and `tests/ir/test_kinds.py`, which are
copied too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

from tests.grid import grid

ROOT = Path(__file__).parents[1]
LIMIT_S = 120
LOUD_SHARE = 0.9
PAGES = ("schedule", "fate", "kind", "planner")
CHILD = Path(__file__).parent / "additions"


@dataclass(frozen=True)
class Place:
    """A place of a page: what a file says (`old`), and what it is to say; of a file that is not
    there, nothing.
    """

    file: str
    old: str
    new: str

    def write(self, root: Path) -> None:
        """Changes the file in a copy."""
        path = root / self.file
        if not self.old:
            path.write_text(self.new)
            return
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file}: {text.count(self.old)} of {self.old!r}"
        path.write_text(text.replace(self.old, self.new))


def places(addition: str) -> list[Place]:
    """The places of a page: its files, and what it shows of others."""
    text = (ROOT / "docs" / f"adding_a_{addition}.md").read_text()
    files = re.findall(r"`(jvpipe/\w+/\w+\.py)`", text)
    made = [Place(name, "", (CHILD / Path(name).name).read_text()) for name in files]
    blocks = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [*made, *(place for block in blocks for place in hunks(block))]


def hunks(block: str) -> Iterator[Place]:
    """Reads a block: a line with a file's name, then lines that stay (blank), go (-) and come
    (+).
    """
    for part in re.split(r"^# (?=jvpipe/|docs/)", block, flags=re.MULTILINE)[1:]:
        file, *lines = part.splitlines()
        old = "\n".join(line[1:] for line in lines if line[0] in " -")
        yield Place(file, old, "\n".join(line[1:] for line in lines if line[0] in " +"))


def copy(to: Path, what: Collection[Place]) -> None:
    """Copies the library, its pages and the named checks, with some places changed."""
    for folder in ("jvpipe", "docs"):
        ignored = shutil.ignore_patterns("models")
        shutil.copytree(ROOT / folder, to / folder, ignore=ignored)
    for name in ("test_house.py", "test_lists.py", "ir/test_kinds.py", "lowering/toy.py"):
        (to / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / "tests" / name, to / "tests" / name)
    for place in what:
        place.write(to)


def complaints(copies: Mapping[Path, Collection[str]]) -> list[str | None]:
    """What is said of each copy and the additions in it, by one process that forks for each; None
    is nothing.
    """
    asked = json.dumps({str(copy): list(additions) for copy, additions in copies.items()})
    done = subprocess.run(
        [sys.executable, CHILD / "check.py", asked],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("addition", PAGES)
def test_a_page_is_one_page(addition: str) -> None:
    assert len((ROOT / "docs" / f"adding_a_{addition}.md").read_text().splitlines()) <= 40


def test_what_the_pages_say_is_all_that_their_additions_need(tmp_path: Path) -> None:
    every = {addition: places(addition) for addition in PAGES}
    copy(tmp_path / "whole", list(chain.from_iterable(every.values())))
    for addition in PAGES:
        copy(tmp_path / addition, every[addition][1:])
    asked = {tmp_path / "whole": PAGES} | {tmp_path / addition: [addition] for addition in PAGES}
    whole, *forgotten = complaints(asked)
    assert whole is None
    assert None not in forgotten


@pytest.mark.parametrize("addition", grid(PAGES))
def test_nine_of_ten_places_that_are_forgotten_are_loud(addition: str, tmp_path: Path) -> None:
    every = places(addition)
    copy(tmp_path / "whole", every)
    for i in range(len(every)):
        copy(tmp_path / str(i), every[:i] + every[i + 1 :])
    names = ["whole", *map(str, range(len(every)))]
    whole, *said = complaints({tmp_path / name: [addition] for name in names})
    assert whole is None, "one page needs no other"
    silent = [place for place, words in zip(every, said, strict=True) if words is None]
    assert len(silent) <= (1 - LOUD_SHARE) * len(every), silent
