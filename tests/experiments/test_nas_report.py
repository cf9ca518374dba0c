"""The pictures of streams of architectures."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from experiments.nas import report
from experiments.nas.report import picture

KEPT = sorted(Path(report.__file__).parent.glob("*.json"))


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_every_panel_shows_all_of_its_rates(path: Path) -> None:
    rates = json.loads(path.read_text())
    figure = picture(path.stem, rates)
    assert len(figure.axes) == len(rates)
    for axes, (_, variants) in zip(figure.axes, sorted(rates.items()), strict=True):
        drawn = [patch.get_data()[0] for patch in axes.patches if isinstance(patch, StepPatch)]
        assert sorted(map(list, drawn)) == sorted(variants.values())
        low, high = axes.get_ylim()
        assert low == 0
        assert np.max(np.concatenate(drawn)) < high
