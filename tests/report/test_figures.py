"""Pictures: written, complete, and without touching matplotlib's global state."""

from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.span import Span
from jvpipe.report.figures import timeline_figure
from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.simulate.rows import simulate_lists
from jvpipe.simulate.stages import StageLoad


def words(path: Path) -> str:
    """What an svg says: its writer leaves each text in a comment."""
    return "\n".join(line.strip()[5:-4] for line in path.read_text().splitlines() if line.strip().startswith("<!-- "))


def test_shows_rows_numbers_memory_and_the_limit(tmp_path: Path) -> None:
    load = StageLoad(
        1.0, 2.0, 0.5, out_s=0.5, in_s=0.5, send_s=0.2, static_bytes=2**30, kept_bytes=2**20, swapped_bytes=2**21
    )
    found = simulate_lists(one_f_one_b(4, 8), [load] * 4)
    path = tmp_path / "timeline.svg"
    timeline_figure(found, path, limits=(2 * 2**30,), title="four stages")
    said = words(path).split("\n")
    for what in ["four stages", "stage 3", "stage 0 host", "stage 0 to 1", "forward", "recompute", "swap out", "send"]:
        assert what in said
    assert "stage 3 to 4" not in said
    assert said.count("7") >= 8  # a forward and a backward on each stage
    assert "limit: 2.00 GiB" in said
    assert f"stage 3: {1.0 + 3 / 1024:.2f} GiB" in said


def test_draws_measured_spans_as_well(tmp_path: Path) -> None:
    spans = [Span("cpu:0", "0F0", 5.0, 6.0, Kind.F, {"microbatch": 0}), Span("cpu:1", "weird", 6.0, 7.0, Kind.ZERO)]
    path = tmp_path / "spans.svg"
    timeline_figure(spans, path)
    assert {"cpu:0", "cpu:1", "forward", "other"} <= set(words(path).split("\n"))


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_writes_other_formats_and_even_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"timeline.{suffix}"
    timeline_figure([], path)
    assert path.stat().st_size > 1000
    assert not plt.get_fignums()
