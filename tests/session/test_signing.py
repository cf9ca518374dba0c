"""Plans that a compiler signs: what it says is what a run holds, and planning goes on where that is
too much.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cli.plan_command import main
from jvpipe.cost import targets
from jvpipe.cost.compiling import Compiler, Refusal, Sizes, compiler_of
from jvpipe.ir.plan import Fate
from jvpipe.session.signing import Signer
from jvpipe.util.extras import MissingExtraError
from tests.grid import grid

PARAMS = [jnp.eye(16) * (1 + i / 9) for i in range(6)]
BATCH = np.ones((256, 16), np.float32)
ADAMW = optax.adamw(1e-3)


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def plan(**options: Any) -> jvpipe.Forecast:
    usual: dict[str, Any] = {"hardware": "cpu", "microbatches": 4, "optimizer": ADAMW}
    return jvpipe.plan_for(
        loss_fn, PARAMS, BATCH, **{"stages": 2, **usual, "compile": True, **options}
    )


def says(monkeypatch: pytest.MonkeyPatch, temporary: Callable[[str], int]) -> list[str]:
    """A compiler that says so many bytes of temporaries; all that it was asked of."""
    asked: list[str] = []

    def sizes(self: Compiler, texts: Sequence[str]) -> list[Sizes]:
        asked.extend(texts)
        return [Sizes(temporary(text)) for text in texts]

    monkeypatch.setattr(Compiler, "sizes", sizes)
    return asked


@pytest.mark.parametrize("schedule", grid(["1f1b", "pipedream"], "1f1b"))
def test_what_is_compiled_in_a_child_is_what_is_held_here(schedule: str) -> None:
    found = plan(schedule=schedule)
    stages, held = found.to_json()["stages"], found.held_bytes
    assert [x["compiled_bytes"] for x in stages] == [held[x["devices"][0]] for x in stages]
    unsigned = plan(schedule=schedule, compile=False).to_json()["stages"]
    if schedule == "1f1b":
        assert [x["planned_bytes"] for x in stages] == [x["peak_bytes"] for x in unsigned]
    for stage in stages:
        assert stage["peak_bytes"] == max(stage["planned_bytes"], stage["compiled_bytes"])
        assert stage["compiled"]["target"] == "cpu"
    asked = compiler_of(targets.TARGETS["cpu"], None).asked
    again = plan(schedule=schedule)
    assert compiler_of(targets.TARGETS["cpu"], None).asked == asked, "a second ask compiles nothing"
    assert again.plan == found.plan


def test_planning_goes_on_until_a_plan_keeps_the_limit_as_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says(monkeypatch, lambda text: 2**15)
    free = plan(memory_limit="1GiB")
    over = max(x.compiled_bytes for x in free.answers[0].compiled)
    assert over > max(x.planned_bytes for x in free.answers[0].compiled)
    limit = over - 2**12
    assert plan(memory_limit=limit, compile=False).plan.cuts == free.plan.cuts
    found = plan(memory_limit=limit)
    assert found.fits
    assert found.plan != free.plan
    for stage in found.answers[0].compiled:
        assert stage.peak_bytes <= limit
    assert found.problem.memory_limit_bytes == limit
    assert "by the compiler for cpu" in str(found)


def test_a_limit_that_no_compiled_plan_keeps_names_one_that_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says(monkeypatch, lambda text: 10**6)
    found = plan(memory_limit=10**6)
    assert not found.fits
    with pytest.raises(
        jvpipe.MemoryLimitExceeded, match="as the compiler for cpu makes it: "
    ) as no:
        found.plan  # noqa: B018
    assert plan(memory_limit=no.value.smallest_limit_bytes).fits
    assert found.to_json()["smallest_limit_bytes"] == no.value.smallest_limit_bytes


def test_a_program_that_is_refused_is_told_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Compiler, texts: Sequence[str]) -> list[Sizes]:
        raise Refusal(self.target, texts[0], "no such fusion")

    monkeypatch.setattr(Compiler, "sizes", refuses)
    told = r"^layer \d \(.*\): the compiler for cpu says: no such fusion$"
    with pytest.raises(ValueError, match=told):
        plan()


def test_swapped_values_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, lambda text: 0)
    found = plan(compile=False)
    (answer,), question, cluster = found.answers, found.question, found.problem.cluster
    assert answer.plan
    assert question
    assert cluster
    first, *rest = answer.plan.stages
    away = replace(
        answer.plan, stages=(replace(first, fates={"0/dot_general_0": Fate.SWAP}), *rest)
    )
    swapping = replace(answer, plan=away)
    stages = Signer.of(cluster).stages(question, found.problem, swapping)
    assert stages[0].host_bytes == 64 * 16 * 4, "what one micro-batch leaves"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--compile", "--hardware", "p40"), "no compile target is known for Tesla P40"),
        (("--compile", "--target", "h10"), "unknown compile target 'h10': did you mean 'h100'"),
        (("--target", "h100"), "--target h100 needs --compile: give both"),
        (("--compile", "--compare", "even,jvpipe"), "compile is for one planner"),
    ],
)
def test_mistakes_are_told_in_one_line(
    options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "tests.own:Plain", "--stages", "2", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_target_without_its_extra_is_told_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = replace(targets.TARGETS["h100"], package="no-such-plugin")
    monkeypatch.setitem(targets.TARGETS, "h100", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'jvpipe\[aot-cuda\]'"):
        plan(hardware="h100")
