"""What the package says of itself: its extras, its versions, the files that call the Makefile."""

import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import jvpipe

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED_AS = {
    "huggingface-hub": "huggingface_hub",
    "jax": "jaxlib",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
}


def named(requirements: list[str]) -> set[str]:
    """The packages of requirements, by the names under which they are imported."""
    names = {re.split(r"[\[<>=]", text)[0] for text in requirements}
    return names | {IMPORTED_AS[name] for name in names & IMPORTED_AS.keys()}


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """The packages that a file imports, and whether when it is imported itself."""
    found = []
    for line in path.read_text().splitlines():
        if match := re.match(
            r"( *)(?:from (\w+)[\w.]* import |import (\w+)[\w.]*( as \w+)?(  #.*)?$)", line
        ):
            found.append((match[2] or match[3], not match[1]))
    return found


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("jvpipe", ["cli", "figures", "tensorboard", "wandb", "models"]),
        ("models", ["models", "parquet", "hf", "images", "translation"]),
    ],
)
def test_what_is_imported_is_of_the_core_or_of_an_extra(folder: str, extras: list[str]) -> None:
    known = named([text for extra in extras for text in EXTRAS[extra]]) | named(
        PROJECT["dependencies"]
    )
    files = [
        path
        for path in (ROOT / folder).rglob("*.py")
        if folder == "models" or "models" not in path.parts
    ]
    found = {name for path in files for name, _ in imports(path)} - set(sys.stdlib_module_names)
    assert found - known <= {"jvpipe"}


def test_all_but_commands_and_pictures_begins_with_the_core_alone() -> None:
    core = named(PROJECT["dependencies"]) | {"jvpipe", *sys.stdlib_module_names}
    others = {
        path.relative_to(ROOT / "jvpipe").as_posix()
        for path in (ROOT / "jvpipe").rglob("*.py")
        if any(at_once and name not in core for name, at_once in imports(path))
        and path.relative_to(ROOT / "jvpipe").parts[0] not in ("cli", "models")
    }
    assert others == {"report/console.py", "report/figures.py", "report/tables.py"}


def test_jax_is_bound_to_what_is_tested() -> None:
    (jax,) = (text for text in PROJECT["dependencies"] if text.startswith("jax>"))
    assert re.fullmatch(r"jax>=0\.10\.\d+,<0\.12", jax)
    assert jax.removeprefix("jax") in EXTRAS["cuda13"][0]


def test_making_bert_installs_no_developers_tools() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "--editable '.[cli,models]'" in makefile
    assert re.search(r"^bert: \$\(TRAINS\)$", makefile, re.MULTILINE)


def test_the_changes_begin_with_this_version() -> None:
    versions = re.findall(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == jvpipe.__version__


def test_who_cites_it_cites_this_version_and_its_licence() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["version"] == jvpipe.__version__
    assert cited["license"] == project["license"]
    assert [each["name"] for each in cited["authors"]] == [
        each["name"] for each in project["authors"]
    ]


def test_what_is_locked_is_what_the_package_asks_for_each_with_its_hashes() -> None:
    """`make lock` writes it; a package that is new in the extras would else be missing where `make
    locked` installs.
    """
    locked = (ROOT / "requirements-dev.txt").read_text()
    assert "://" not in locked
    pins = re.split(r"\n(?=\S)", locked.strip())
    assert all(
        re.search(r"^[\w.-]+==\S+ .*(\n +--hash=sha256:[0-9a-f]{64}.*)+$", pin) for pin in pins
    )
    versions: dict[str, list[str]] = {}
    for pin in pins:
        name, version = pin.split()[0].split("==")
        versions.setdefault(name, []).append(version)
    extras = Requirement(EXTRAS["dev"][0]).extras | {"dev"}
    asked = [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    for need in map(Requirement, asked):
        if need.name != "jvpipe":
            assert all(version in need.specifier for version in versions[need.name.lower()]), need


def test_continuous_integration_calls_the_makefile() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    called = {
        target
        for command in commands
        if command.startswith("make ")
        for target in command.split()[1:]
        if "=" not in target
    }
    assert called == {"test", "thorough", "peers", "wheel", "docs", "locked"}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert called < targets
    assert (ROOT / ".ci/run").read_text().endswith("make test\n")
