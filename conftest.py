"""Every test and doctest sees the same process: CPU, eight devices, strict promotion, checked
annotations.
"""

import functools
import gc
import os
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

gc.disable()  # until all is collected: nothing that is imported is garbage
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No test finds what another one compiled, or what the user's own runs did.
os.environ["JAX_COMPILATION_CACHE_DIR"] = ""
for limit in (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
):  # the workers' memory stays theirs: fewer page faults
    os.environ.setdefault(limit, str(2**32))
# Tests compile much and compute little, so the compiler need not try hard; what they compare is
# compiled alike. The bits under its usual settings are looked at in
# tests/end_to_end/test_usual_settings.py.
flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # a flag that XLA does not know ends the process
    flags += ["--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"]
    flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
for flag in flags:
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

from tests.checked import check, check_again  # noqa: E402

hypothesis.settings.register_profile("same every time", derandomize=True, database=None)
hypothesis.settings.load_profile("same every time")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def shaped_modules() -> list[str]:
    """The modules whose annotations tell shapes: checking those costs ten times as much, so only
    they are.
    """
    here = Path(__file__).parent
    rooms = ("jvpipe/*/*.py", "jvpipe/runtime/*/*.py")
    files = (file.relative_to(here) for room in rooms for file in here.glob(room))
    return [
        ".".join(file.with_suffix("").parts)
        for file in files
        if "jaxtyping" in (here / file).read_text() and file.parent.name != "papers"
    ]


# What users give is checked by these themselves, and tests give what no annotation allows.
CHECKING = (
    "jvpipe.pipeline",
    "jvpipe.trainer",
    "jvpipe.replay",
    "jvpipe.report.trackers",
    "jvpipe.session.forecast",
    "jvpipe.session.forecasts",
    "jvpipe.session.arguments",
    "jvpipe.session.session",
    "jvpipe.session.engine",
    "jvpipe.session.checkpoints",
    "jvpipe.session.checked_settings",
    "jvpipe.session.question",
    "jvpipe.session.measuring",
    "jvpipe.runtime.engine.feeds",
    "jvpipe.runtime.engine.given_agreement",
    "jvpipe.runtime.engine.memory_limits",
    "jvpipe.runtime.engine.meshes",
    "jvpipe.runtime.state.checkpoints.checkpoint",
    "jvpipe.trace.batches",
    "jvpipe.ir.plan",
    "jvpipe.util.sizes",
)
# What is called by the million: checking that took a third of the seconds of the tests of planners
# and of streams.
HOT = (
    "jvpipe.planners.model.stage_bytes",
    "jvpipe.planners.model.stage_cost",
    "jvpipe.lowering.stream.stream_timeline",
)
check("jvpipe", (*CHECKING, *HOT))
install_import_hook(shaped_modules(), "beartype.beartype")


def standard_promotion(function: Callable) -> Callable:
    """`function`, excepted from strict dtype promotion."""

    @functools.wraps(function)
    def excepted(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return excepted


def accept_optax() -> None:
    """Optax mixes step counts with floats: Adam's `decay**count` fails under strict promotion."""
    plain = optax.GradientTransformation.__new__

    def excepted(cls: type, init: Callable, update: Callable) -> optax.GradientTransformation:
        return plain(cls, standard_promotion(init), standard_promotion(update))

    optax.GradientTransformation.__new__ = excepted
    optax.GradientTransformationExtraArgs.__new__ = excepted


accept_optax()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make thorough` asks for."""
    parser.addoption(
        "--thorough",
        action="store_true",
        help="every combination, where a part of them tells as much",
    )


@pytest.fixture(scope="session", autouse=True)
def _state_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What commands keep for their user is kept for the tests alone."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether every combination is tried."""
    return bool(request.config.getoption("--thorough"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `make thorough` alone tries."""
    if config.getoption("--thorough"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup() -> None:
    """Lets each test find calls whose arguments are not what annotations tell."""
    check_again()


def pytest_collection_finish() -> None:
    """Takes what was imported out of the collector's sight: walking it again and again took a
    twelfth of the suite.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture
def copies_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is ever late, so peaks are those of the lists: on a busy machine one may be, and then
    less is held.
    """

    def arrived(array: jax.Array) -> bool:
        array.block_until_ready()
        return True

    monkeypatch.setattr("jvpipe._jax.is_ready", arrived)
