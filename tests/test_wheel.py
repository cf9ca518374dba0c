"""The wheel holds jvpipe with jvpipe.models, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("jvpipe", "models", "tests"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).glob("py.typed")]:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (path,) = out.glob("*.whl")
    return path


def test_holds_only_jvpipe(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"jvpipe", f"{wheel.name.split('-py3')[0]}.dist-info"}
    sources = {f"jvpipe/{path.relative_to(ROOT / 'jvpipe')}" for path in (ROOT / "jvpipe").rglob("*.py")}
    sources |= {f"jvpipe/models/{path.relative_to(ROOT / 'models')}" for path in (ROOT / "models").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "jvpipe/py.typed" in names


def test_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = "import jvpipe, jvpipe.models as m; print(jvpipe.__file__); print(m.__file__)"
    # sys.path goes before an editable install's import hook, so the wheel's files win.
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120)
    package, models = done.stdout.splitlines()
    assert Path(package) == tmp_path / "jvpipe/__init__.py"
    assert Path(models) == tmp_path / "jvpipe/models/__init__.py"
