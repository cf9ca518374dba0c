"""The pages are built, and whatever is said against them is an error; every link within the site
leads somewhere.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from jvpipe.schedules import SCHEDULES
from tests.forks import forked

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


class Page(HTMLParser):
    """The links of a page, and what can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.names.add(value)


def words(text: str) -> str:
    """A page without its tags."""
    return re.sub(r"<[^>]+>", "", text)


@cache
def page(path: Path) -> Page:
    return Page(path.read_text())


def dead(site: Path) -> Iterator[str]:
    """The links of a site that lead nowhere inside of it."""
    for path in site.rglob("*.html"):
        for link in page(path).links:
            file, name = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", link):
                continue
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            named = name and target.suffix == ".html" and target.exists()
            if not target.exists() or (named and name not in page(target).names):
                yield f"{path.relative_to(site)}: {link}"


def build(arguments: Sequence[str]) -> int:
    """What `python -m sphinx` does."""
    from sphinx.cmd.build import main

    return main(list(arguments))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    for package in ("sphinx_copybutton", "myst_nb"):
        pytest.importorskip(package, reason="make installs what the pages are built with")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "pages")
    options = ["--fail-on-warning", "--keep-going", "--quiet"]
    options += ["-D", "nb_execution_mode=off"]  # tests/docs/test_tutorials.py runs them
    with forked(build, *options, str(folder / "pages"), str(folder / "html"), stands=ROOT) as fork:
        done = fork.ended()
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.thorough
def test_every_link_within_the_site_leads_somewhere(site: Path) -> None:
    assert list(dead(site)) == []


@pytest.mark.thorough
def test_the_index_has_a_picture_an_install_line_and_code(site: Path) -> None:
    text = (site / "index.html").read_text()
    for what in ("plan.png", "copybutton.js", "wide.css"):
        assert what in text
    for what in ("pip install", "jvpipe.Pipeline(loss_fn"):
        assert what in words(text)


@pytest.mark.thorough
def test_the_api_has_types_and_sources(site: Path) -> None:
    text = words((site / "api.html").read_text())
    assert "microbatches: int | None = None" in text
    assert "MemoryLimitExceeded" in text
    assert "[source]" in text


def test_all_pages_examples_and_schedules_are_told() -> None:
    told = (DOCS / "index.md").read_text().split("\n")
    assert {path.stem for path in DOCS.glob("*.md")} - set(told) == {"index"}
    tutorials = {f"tutorials/{path.stem}" for path in (DOCS / "tutorials").glob("*.ipynb")}
    assert len(tutorials) == 5
    assert tutorials <= set(told)
    examples = (DOCS / "examples.md").read_text()
    files = [path for path in (ROOT / "examples").rglob("*.*") if path.suffix != ".pyc"]
    assert [path.name for path in files if f"/{path.name}\n" not in examples] == []
    gallery = (DOCS / "gallery.md").read_text()
    drawn = set(re.findall(r"--figure (\S+)", gallery))
    assert drawn == {Path(name).name for name in re.findall(r"!\[[^]]*\]\((.*)\)", gallery)}
    assert drawn - {"plan.png"} == {path.name for path in (DOCS / "gallery").iterdir()}
    api = (DOCS / "api.md").read_text()
    assert [name for name in SCHEDULES if f'`"{name}"`' not in api] == []
