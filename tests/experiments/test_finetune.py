"""The whole of fine-tuning, with transformers on the other side, where `make peers` has made its
environment.
"""

import re

import pytest

from experiments.finetune import run


@pytest.mark.thorough
@pytest.mark.skipif(not run.PEER.exists(), reason="no environment with transformers: make peers")
def test_a_folder_goes_from_transformers_to_transformers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run.main(steps=5)
    told = capfd.readouterr().out
    whole, _, limited = re.findall(r"\| ([\d.]+) MiB \|", told)
    assert float(limited) < 0.75 * float(whole)
    assert "under the limit the same bits" in told
    apart = re.search(r"at most (\S+) from ours", told)
    assert apart is not None
    assert float(apart[1]) < 1e-4
