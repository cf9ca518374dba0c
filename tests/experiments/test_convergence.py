import numpy as np
import pytest

from experiments.convergence.run import BATCH, WAYS, train
from jvpipe.models import Data, load
from jvpipe.models.batches import fixed_batches, train_batches
from jvpipe.models.text import next_tokens


def counting() -> Data:
    """Records that count upwards."""
    records = (np.arange(300)[:, None] + np.arange(9)).astype(np.int32) % 300
    held_out = fixed_batches(records[::9], next_tokens, BATCH)
    return Data(train_batches(records, next_tokens, 0, BATCH), held_out[0], held_out, digest="")


@pytest.mark.thorough
def test_every_way_learns_and_a_move_changes_no_bit_of_a_synchronous_one() -> None:
    workload, names = (
        load("gpt2", "tiny", tokens=8),
        ("1f1b", "1f1b, a layer moves", "pipedream, a layer moves"),
    )
    plain, moved, stream = curves = [train(WAYS[name], workload, counting(), 8) for name in names]
    assert plain.losses == moved.losses
    assert [curve.updates for curve in curves] == [8, 8, 32]
    for curve in curves:
        assert curve.examples == tuple(BATCH * n for n in range(9))
        assert list(curve.seconds) == sorted(curve.seconds)
    assert stream.losses[-1] < plain.losses[-1] < plain.losses[0]
    assert moved.row("moved").count("|") == 8
