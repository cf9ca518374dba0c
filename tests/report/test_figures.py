"""Pictures: written, complete, and without touching matplotlib's global state."""

from itertools import permutations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.span import Level, Picture, Span
from jvpipe.report.figures import timeline_figure
from jvpipe.schedules import find_schedule
from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.simulate.simulator import simulate_lists
from jvpipe.simulate.stages import StageLoad


def words(path: Path) -> str:
    """What an svg says: its writer leaves each text in a comment."""
    return "\n".join(
        line.strip()[5:-4]
        for line in path.read_text().splitlines()
        if line.strip().startswith("<!-- ")
    )


def sends_by_row(path: Path) -> np.ndarray:
    """How many marks in the color of sends each row of pixels has, between the labels and the
    legend.
    """
    dark = 1 - plt.imread(path)[:, 100:1380, :3]
    ink = 1 - np.asarray(to_rgb(KINDS[Kind.SEND].look[1]))
    share = dark @ ink / (ink @ ink)
    plain = np.abs(dark - share[:, :, None] * ink).max(2) < 0.05
    marked = np.pad((share > 0.25) & (share < 1.05) & plain, ((0, 0), (1, 0))).astype(int)
    return (np.diff(marked, axis=1) == 1).sum(1)


@pytest.mark.parametrize("width_s", [0.0, 1e-4, 3e-3])
def test_every_box_is_seen_however_thin(tmp_path: Path, width_s: float) -> None:
    starts_s = np.linspace(0.1, 0.9, 48) + np.random.default_rng(0).uniform(0, 1e-3, 48)
    sends = [
        Span("stage 0 to 1", f"0SEND{m}", s, s + width_s, Kind.SEND) for m, s in enumerate(starts_s)
    ]
    path = tmp_path / "sends.png"
    timeline_figure(Picture((Span("stage 0", "0F0", 0.0, 1.0, Kind.F), *sends)), path)
    assert 48 in sends_by_row(path)


def test_a_thin_box_between_wide_ones_is_seen(tmp_path: Path) -> None:
    work = [Span("stage 0", f"0F{m}", 0.1 * m, 0.1 * (m + 1), Kind.F) for m in range(10)]
    copies = [
        Span("stage 0", f"0SEND{m}", 0.1 * m, 0.1 * m + 1e-5, Kind.SEND) for m in range(1, 10)
    ]
    path = tmp_path / "between.png"
    timeline_figure(Picture((*copies, *work)), path)
    assert 9 in sends_by_row(path)


def test_the_picture_of_the_readme_shows_all_sends() -> None:
    by_row = sends_by_row(Path(__file__).parents[2] / "docs" / "plan.png")
    edges = np.flatnonzero(np.diff(np.pad(by_row == 4, 1)))
    heights = edges[1::2] - edges[::2]
    assert (
        heights > 10
    ).sum() == 6  # a row for each direction between four stages, four sends in each


def test_shows_rows_numbers_memory_and_the_limit(tmp_path: Path) -> None:
    load = StageLoad(
        1.0,
        2.0,
        0.5,
        out_s=0.5,
        in_s=0.5,
        send_s=0.2,
        static_bytes=2**30,
        kept_bytes=2**20,
        swapped_bytes=2**21,
    )
    found = simulate_lists(one_f_one_b(4, 8), [load] * 4)
    path = tmp_path / "timeline.svg"
    timeline_figure(
        found.picture(),
        path,
        limits=dict.fromkeys(("stage 0", "stage 3"), 2 * 2**30),
        title="four stages",
    )
    said = words(path).split("\n")
    for what in [
        "four stages",
        "stage 3",
        "stage 0 host",
        "stage 0 to 1",
        "forward",
        "recompute",
        "swap out",
        "send",
    ]:
        assert what in said
    assert "stage 3 to 4" not in said
    assert said.count("7") >= 8  # a forward and a backward on each stage
    assert "limit: 2.00 GiB" in said
    assert f"stage 3: {1.0 + 3 / 1024:.2f} GiB" in said


def test_draws_measured_spans_as_well(tmp_path: Path) -> None:
    spans = (
        Span("cpu:0", "0F0", 5.0, 6.0, Kind.F, {"microbatch": 0}),
        Span("cpu:1", "weird", 6.0, 7.0, Kind.ZERO),
    )
    levels = (Level("cpu:0", 0.0, 2**20), Level("host", 0.0, 0), Level("cpu:0", 6.0, 3 * 2**20))
    path = tmp_path / "spans.svg"
    timeline_figure(Picture(spans, levels), path)
    said = set(words(path).split("\n"))
    assert {"cpu:0", "cpu:1", "forward", "other", "cpu:0: 3.00 MiB", "2 s"} <= said
    assert not {"host: 0 B", "7 s"} & said


def test_a_limit_far_above_leaves_the_panel_to_what_is_held(tmp_path: Path) -> None:
    work = (Span("stage 0", "0F0", 0.0, 1.0, Kind.F),)
    path = tmp_path / "small.svg"
    timeline_figure(
        Picture(work, (Level("stage 0", 0.0, 2**20),)), path, limits={"stage 0": 80 * 2**30}
    )
    said = words(path).split("\n")
    assert {"limit: 80.00 GiB, above", "1 MiB"} <= set(said)
    assert "80 GiB" not in said


def test_unlike_limits_are_told_with_their_places(tmp_path: Path) -> None:
    work = tuple(Span(f"stage {s}", f"{s}F0", 0.0, 1.0, Kind.F) for s in range(2))
    levels = (Level("stage 0", 0.0, 2**30), Level("stage 1", 0.0, 2**31))
    path = tmp_path / "unlike.svg"
    timeline_figure(Picture(work, levels), path, {"stage 0": 2**31, "stage 1": 3 * 2**30})
    said = set(words(path).split("\n"))
    assert {"limit of stage 0: 2.00 GiB", "limit of stage 1: 3.00 GiB"} <= said


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_links_of_a_loop_are_named_by_both_ends(devices: int) -> None:
    load = StageLoad(1.0, 2.0, 0.5, send_s=0.2, return_s=0.2)
    lists = find_schedule("interleaved").tasks(devices, 4)
    found = simulate_lists(lists, [load] * (2 * devices))
    rows = {span.device for span in found.spans() if span.kind in (Kind.SEND, Kind.RETURN)}
    pairs = {frozenset((d, (d + 1) % devices)) for d in range(devices)}
    assert rows == {f"device {a} to {b}" for pair in pairs for a, b in permutations(pair)}


def test_where_nothing_is_held_there_is_no_panel(tmp_path: Path) -> None:
    work = (Span("stage 0", "0F0", 0.0, 1.0, Kind.F),)
    path = tmp_path / "nothing.svg"
    timeline_figure(Picture(work, (Level("stage 0", 0.0, 0),)), path, limits={"stage 0": 2**30})
    assert not any("B" in word for word in words(path).split("\n")[1:])


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_writes_other_formats_and_even_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"timeline.{suffix}"
    timeline_figure(Picture(()), path)
    assert path.stat().st_size > 1000
    assert not plt.get_fignums()
