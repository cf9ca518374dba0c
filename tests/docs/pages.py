"""The README and the pages of docs/ as blocks of code, and how each kind of block is run, small."""

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.faults.runs import page as page_of_prose
from jvpipe.models import NAMES
from jvpipe.schedules import find_schedule

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(path for path in (ROOT / "docs").glob("*.md") if not path.is_symlink())
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS)
PAGES = {path.name: path for path in FILES}
WHY = r"(?:<!-- not run: (?P<why>.*?) -->\n)?"
BLOCK = re.compile(rf"^{WHY}```(?P<language>.*?)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PROSE = "page.txt"
EVERY = {"--eval-every", "--profile", "--checkpoint-every"}
README = """
import jax, jax.numpy as jnp, numpy as np, optax
import jvpipe

def loss_fn(params, batch, rng):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)

params, batch = [np.eye(8, dtype=np.float32)] * 8, np.ones((8, 8), np.float32)
batches = [batch] * 2
"""
"""What the README's blocks take for granted; a page of docs/ takes nothing."""


@dataclass(frozen=True)
class Block:
    """Code between two fences; `why` it is not run, if it is not."""

    language: str
    text: str
    why: str | None

    @property
    def file(self) -> str | None:
        """The file that it is the content of: its first line is a comment with the name."""
        found = re.match(r"# ([\w./]+)\n", self.text)
        return found[1] if found else None

    @property
    def lines(self) -> list[str]:
        """The lines, those that a backslash joins as one."""
        return self.text.replace("\\\n", " ").splitlines()


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    found = BLOCK.finditer(PAGES[page].read_text())
    return [Block(match["language"], match["text"], match["why"]) for match in found]


def code(page: str) -> str:
    """What a page has of Python, but for files, as one program; every block is a statement of its
    own line.
    """
    parts = [
        b.text for b in blocks(page) if b.language == "python" and not b.file and b.why is None
    ]
    return "\n".join([README, *parts] if parts and page == "README.md" else parts)


def commands(page: str) -> Iterator[str]:
    """The commands of a page, in order."""
    for block in blocks(page):
        if block.language == "sh" and block.why is None:
            yield from block.lines


def words(command: str) -> list[str]:
    """The words of a command after `python -m`, small; those of make are what its recipe says."""
    if command.startswith("make "):
        target = shlex.split(command, comments=True)[1]
        command = re.search(
            rf"^{target}:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
        )[1]  # type: ignore
        command = command.replace("$(BIN)/", "").replace("$(ARGS)", "")
    given = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z]+=", word)]
    assert given[:2] == ["python", "-m"], f"there is no way to run {command!r}"
    return [given[2], *_small(given[2], given[3:])]


def _small(module: str, given: Sequence[str]) -> list[str]:
    named = {
        word: given[i + 1] if i + 1 < len(given) else ""
        for i, word in enumerate(given)
        if word.startswith("--")
    }
    options = {
        name: None if not value or value.startswith("--") else value
        for name, value in named.items()
    }
    if options.get("--model") in NAMES and "--init-from" not in options:
        options["--size"] = "tiny"
    elif "--model" in options:
        options.pop("--size", None)
    if int(options.get("--stages") or 0) > 4:
        options["--stages"] = "4"  # small models have few layers
    if find_schedule(options.get("--schedule") or "1f1b").chunks > 1:
        options["--stages"] = "2"
    if module == "jvpipe.train":
        options |= {"--steps": "2", "--batch-size": "8"} | dict.fromkeys(
            EVERY & options.keys(), "1"
        )
        options |= {"--nas-steps": "1", "--steps": "1"} if "--nas" in options else {}
        options |= {"--data": PROSE} if options.get("--model") in NAMES else {}
        options |= (
            {"--planner": "even"} if "--planner" not in options and "--plan" not in options else {}
        )
    if "--resume" in options:  # the model stays as it is
        options["--steps"] = "4"
        del options["--batch-size"]
    return [word for name, value in options.items() for word in (name, value) if word is not None]


def prepare(page: str, folder: Path) -> None:
    """Writes the files of a page into a folder, and what commands find at the root of the
    project.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    page_of_prose(folder / PROSE)
    shutil.copytree(ROOT / "tests" / "data" / "weights" / "llama", folder / "base")
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)


def run_code(arguments: Sequence[str]) -> None:
    """Runs what a page has of Python, on the eight devices that there are."""
    (page,) = arguments
    exec(compile(code(page), page, "exec"), {"__name__": "__main__"})


def run_command(arguments: Sequence[str]) -> int:
    """Runs the words of a command."""
    from jvpipe.cli import overview, plan_command, train_command

    module, *options = arguments
    commands = {"jvpipe": overview, "jvpipe.train": train_command, "jvpipe.plan": plan_command}
    return commands[module].main(options)
