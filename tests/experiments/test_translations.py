"""The part of experiments/learns that is about translations."""

from pathlib import Path

import jax
import pytest

from experiments.learns.translations import judged_translation
from jvpipe.models import load
from tests.zoo import quick_key


@pytest.mark.thorough
def test_a_model_that_has_learned_nothing_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workload = load("gnmt", "tiny", tokens=24, vocabulary=400)
    params = jax.jit(workload.init)(quick_key(0))
    found = judged_translation(workload, params, tmp_path / "run")
    assert list(found) == ["perplexity", "BLEU"]
    assert found["perplexity"][0] < 300 < found["perplexity"][1]
    assert found["BLEU"][1] < 1 < found["BLEU"][0] < 10
