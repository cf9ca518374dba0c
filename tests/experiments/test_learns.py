"""Two steps of tiny models, and what those say who look at nothing."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.learns.run import judged, learn
from jvpipe.models.image_data import open_images


@pytest.mark.thorough
def test_a_row_of_a_tiny_model() -> None:
    found = learn("vgg", 2, "tiny", "even")
    assert (found.model, list(found.metrics), found.steps) == ("vgg", ["top_1"], 2)
    trivial, learned = found.metrics["top_1"]
    assert 0.25 <= trivial < 0.3
    assert 0 <= learned <= 1
    assert found.row().startswith("| vgg | ")


def test_what_is_told_without_looking() -> None:
    masks = np.zeros((2, 2, 2), np.float32)
    masks[0, 0, 0] = masks[1, 1, 1] = 1
    images = open_images(None, 0, 4, side=8, classes=3)
    data = replace(images, held_out=[{"masks": masks}], baseline_loss=float(np.log(8)))
    assert judged(data, [{"loss": 0.0, "aux": {"dice": 0.5}}]) == {
        "dice": (pytest.approx(0.4), 0.5)
    }
    assert judged(data, [{"loss": 0.0}, {"loss": np.log(4)}]) == {
        "perplexity": (pytest.approx(8), pytest.approx(2))
    }
