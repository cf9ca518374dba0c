"""Every command and every block of code in the README and in docs/ runs, at small sizes."""

import re
import shlex
from pathlib import Path

import pytest

from jvpipe.cli.command_line import read_options
from jvpipe.cli.command_options import TrainOptions
from jvpipe.cli.plan_command import PlanOptions
from jvpipe.models import NAMES, sizes
from tests.commands import here
from tests.docs.pages import PAGES, blocks, code, commands, prepare, run_code, run_command, words
from tests.grid import grid

NOT_RUN = {
    "a GPU",
    "needs a network",
    "several hosts",
    "installs packages",
    "the whole suite",
    "the file is a profile of yours",
    "wants the compiler for H100s, and minutes",
}
"""Why blocks are not run here: what they need is not here, or they would run these tests."""
RAN: set[str] = set()
"""Commands that more than one page has are run once, but for those that go on with a run."""
READ_FIRST = ("README.md", "index.md", "start.md", "memory.md")
LANGUAGES = {"python", "diff", "sh", "toml", "yaml", "json"}
DIRECTIVE = re.compile(r"\{(?:toctree|eval-rst|literalinclude)\}.*")
COLUMNS = 100
"""What a box of the site has room for: docs/_static/wide.css."""


def test_what_is_not_run_says_why() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert {block.why for block in found} - {None} == NOT_RUN
    code = [block for block in found if not DIRECTIVE.fullmatch(block.language)]
    assert {block.language for block in code} <= LANGUAGES
    assert all(block.file for block in found if block.language == "toml" and block.why is None)
    assert all(block.why for block in found if block.language == "yaml")


def test_code_fits_into_its_box() -> None:
    found = [(page, line) for page in PAGES for b in blocks(page) for line in b.text.splitlines()]
    assert [(page, line) for page, line in found if len(line) > COLUMNS] == []


def test_commands_are_made_small() -> None:
    command = (
        "NPROC=1 python -m jvpipe.train --model gpt2 --size 124m --stages 8 --adapt --steps 500  "
        "# long"
    )
    small = ["--size", "tiny", "--stages", "4", "--adapt", "--steps", "2", "--batch-size", "8"]
    assert words(command) == [
        "jvpipe.train",
        "--model",
        "gpt2",
        *small,
        "--data",
        "page.txt",
        "--planner",
        "even",
    ]
    assert words("make bert ARGS=") == words("python -m jvpipe.train --model bert")


def test_options_and_sizes_are_there_where_nothing_runs_at_full_size() -> None:
    found = [
        line
        for page in PAGES
        for block in blocks(page)
        for line in block.lines
        if block.language == "sh"
    ]
    parsed = 0
    for module, rest in re.findall(r"python -m jvpipe\.(train|plan) (.*)", "\n".join(found)):
        given = shlex.split(rest, comments=True)
        told = read_options({"train": TrainOptions, "plan": PlanOptions}[module], given, module)
        model, size = told.get("model"), told.get("size")
        assert model not in NAMES or size in (None, *sizes(str(model)))
        parsed += 1
    assert parsed > 15


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    root = Path(__file__).parents[2]
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGES[page].read_text())
    assert [name for name in named if not (root / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_code_is_fenced_and_links_lead_somewhere(page: str) -> None:
    text = PAGES[page].read_text()
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {4}(?:python|pip|make|srun|import) .*", outside, re.MULTILINE) == []
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (PAGES[page].parent / link).exists()


@pytest.mark.parametrize("page", grid([page for page in PAGES if code(page)], *READ_FIRST))
def test_code_runs(page: str, tmp_path: Path) -> None:
    prepare(page, tmp_path)
    here(run_code, page, stands=tmp_path)


@pytest.mark.parametrize(
    "page",
    grid([page for page in PAGES if list(commands(page))], "README.md", "start.md"),
)
def test_commands_run(page: str, tmp_path: Path) -> None:
    prepare(page, tmp_path)
    for command in commands(page):
        if command in RAN and "--run-dir" not in command:
            continue
        RAN.add(command)
        done = here(run_command, *words(command), stands=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
