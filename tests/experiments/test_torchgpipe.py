"""The tables' functions on a small U-Net."""

import pytest

from experiments.torchgpipe.run import Benchmark, as_jvpipe, as_torchgpipe, memory, speeds


def test_rows_of_a_small_unet(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Benchmark("one", "unet", "tiny", 1, 1, 8, 2.0, whole=True),
        Benchmark("two", "unet", "tiny", 2, 4, 8, 3.0),
    ]
    problem = rows[1].problem("gpipe")
    theirs, ours = as_torchgpipe(problem), as_jvpipe(problem)
    assert ours is not None
    assert ours.step_s < theirs.step_s
    assert len(ours.device_bytes) == len(theirs.device_bytes) == 2
    assert max(as_torchgpipe(problem, whole=True).device_bytes) > max(theirs.device_bytes)
    speeds(rows)
    memory(rows[:1])
    told = capsys.readouterr().out.splitlines()
    assert told[2].startswith("| one | 8 | 2.0 | 1.00x |")
    assert told[3].startswith("| two | 8 | 3.0 | 1.50x |")
    assert told[6].startswith("| one | (1, 4) | 1,694 | 2.0 |")
