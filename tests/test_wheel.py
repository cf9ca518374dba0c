"""The wheel holds jvpipe with jvpipe.models and nothing else; beside the core's packages alone it
works.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
SLOW = {
    "optax",
    "scipy",
    "matplotlib",
    "flax",
    "rich",
    "grain",
    "tokenizers",
}
"""Packages that `import jvpipe` leaves alone."""
USED = """
import jax, jax.numpy as jnp, json, numpy as np, sys
before = set(sys.modules)
import jvpipe
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
print(jvpipe.__file__, jvpipe.__version__)

import optax
def loss_fn(params, batch, rng):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)

params, batch = [jnp.eye(4)] * 4, np.ones((4, 4), np.float32)
pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), stages=2, microbatches=2, planner="even")
state, metrics = pipe.step(pipe.init(params, batch, jax.random.key(0)), batch)
pipe.save("saved", state)
assert pipe.restore("saved").step == 1
found = jvpipe.plan_for(loss_fn, params, batch, stages=2, hardware="h100", microbatches=2)
assert found.plan.cuts in ((1, 3), (2, 2), (3, 1)), found.plan.cuts
from jvpipe import models
for needs in (lambda: found.figure("plan.svg"), lambda: str(found), lambda: models.load("bert")):
    try:
        needs()
    except ImportError as missing:
        print(missing)
"""


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
    shutil.copytree(ROOT / "releasing", source / "releasing")
    build = "import sys; sys.path.append('releasing'); import build_readme; "
    build += "build_readme.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (path,) = out.glob("*.whl")
    return path


def needs(
    distribution: Distribution, extras: Iterable[str] = ()
) -> list[tuple[str, frozenset[str]]]:
    """The packages that a distribution asks for, with the extras that it asks for of each."""
    asked = map(Requirement, distribution.requires or ())
    wanted = [
        a
        for a in asked
        if a.marker is None or any(a.marker.evaluate({"extra": e}) for e in (*extras, ""))
    ]
    return [(a.name, frozenset(a.extras)) for a in wanted]


def needed(wheel: Path) -> set[str]:
    """The names of all packages without which a wheel cannot be."""
    folder = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    todo = needs(PathDistribution(zipfile.Path(wheel, folder.removesuffix("METADATA"))))
    seen = set()
    while todo:
        if (each := todo.pop()) not in seen:
            seen.add(each)
            todo += needs(Distribution.from_name(each[0]), each[1])
    return {name for name, _ in seen}


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel and, as links, what the core needs: nothing
    is downloaded.
    """
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False, symlinks=True)
    (site,) = root.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    for name in needed(wheel):
        for file in Distribution.from_name(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(here / top)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(root / "bin/python"),
        "--disable-pip-version-check",
    ]
    install = [
        *command,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        str(wheel),
    ]
    subprocess.run(
        install, cwd=root, env={"PATH": ""}, check=True, capture_output=True, timeout=120
    )
    return root / "bin/python"


def test_holds_only_jvpipe(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"jvpipe", f"{wheel.name.split('-py3')[0]}.dist-info"}
    sources = {
        f"jvpipe/{path.relative_to(ROOT / 'jvpipe')}" for path in (ROOT / "jvpipe").rglob("*.py")
    }
    sources |= {
        f"jvpipe/models/{path.relative_to(ROOT / 'models')}"
        for path in (ROOT / "models").rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources
    assert "jvpipe/py.typed" in names


@pytest.mark.thorough
def test_the_wheel_beside_the_core_alone_trains_saves_plans_and_names_extras(
    python: Path, tmp_path: Path
) -> None:
    environment = {
        "PATH": "",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    options = {
        "cwd": tmp_path,
        "env": environment,
        "capture_output": True,
        "text": True,
        "timeout": 120,
    }
    used = subprocess.run([str(python), "-c", USED], **options)
    assert used.returncode == 0, used.stderr
    imported, where, *extras = used.stdout.splitlines()
    assert SLOW & set(json.loads(imported)) == set()
    assert where.startswith(str(python.parents[1]))
    assert extras == [
        "matplotlib is not installed: pip install 'jvpipe[figures]'",
        "rich is not installed: pip install 'jvpipe[cli]'",
        "flax is not installed: pip install 'jvpipe[models]'",
    ]
    command = subprocess.run([str(python), "-m", "jvpipe.train"], **options)
    assert (command.returncode, command.stdout) == (2, "")
    assert command.stderr == "error: rich is not installed: pip install 'jvpipe[cli]'\n"


def test_the_environment_is_that_of_the_core(python: Path) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    assert SLOW & {path.name for path in site.iterdir()} <= {"optax", "scipy"}


FIVE = """
import jax, jax.numpy as jnp, numpy as np, optax, jvpipe
def loss_fn(params, batch, rng):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)

params, batches = [jnp.eye(4)] * 8, [np.ones((8, 4), np.float32)] * 2
batch = batches[0]
pipe = jvpipe.Pipeline(loss_fn, optax.adamw(1e-3), stages=4, microbatches=8, memory_limit="16GiB")
state = pipe.init(params, batch, jax.random.key(0))
for batch in batches:
    state, metrics = pipe.step(state, batch)  # returns at once; reading metrics["loss"] waits
print(pipe.explain())  # what runs where, what it holds, and why
"""


@pytest.mark.thorough
def test_a_wheel_in_an_empty_environment_has_the_command_plans_and_trains(
    wheel: Path, tmp_path: Path
) -> None:
    """With pip and a registry: skipped where there is none."""
    venv.create(tmp_path / "env", with_pip=True)
    pip = [str(tmp_path / "env/bin/python"), "-m", "pip", "install", "--quiet"]
    done = subprocess.run([*pip, f"{wheel}[cli,models]"], capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("no registry of packages is reached")
    assert done.returncode == 0, done.stderr
    flags = "--xla_force_host_platform_device_count=4"
    where = {"cwd": tmp_path, "env": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PATH": ""}}

    def told(*command: str) -> str:
        call = [str(tmp_path / "env/bin" / command[0]), *command[1:]]
        ran = subprocess.run(call, capture_output=True, text=True, timeout=300, **where)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert told("jvpipe", "--version").startswith("jvpipe ")
    plan = ("plan", "--model", "bert", "--size", "mini", "--stages", "2", "--hardware", "h100")
    assert "--pipeline-model-parallel-layout" in told(
        "jvpipe", *plan, "--export", "megatron", "--lossy"
    )
    assert "stage 3" in told("python", "-c", FIVE)
    readme = (ROOT / "README.md").read_text()
    assert "\n".join(FIVE.strip().splitlines()[-5:]) in readme
