"""What a model that translates has learned: perplexity and BLEU, beside what is had without
learning.
"""

import math
from importlib import import_module
from pathlib import Path
from typing import Any

from jvpipe.models import Workload
from jvpipe.models.metrics import bleu, perplexity, translate
from jvpipe.models.tokens import open_tokenizer
from jvpipe.models.translation import open_parallel


def judged_translation(
    workload: Workload, params: Any, folder: Path
) -> dict[str, tuple[float, float]]:
    """By the name of a metric, its value without learning and its value under a model, on the
    held-out pairs.

    Without learning one knows how often each token occurs, or leaves a sentence as it is.

    Args:
        workload: a model that translates.
        params: its parameters.
        folder: that of its run, where its tokenizer is.
    """
    config: Any = workload.config
    logits = import_module(f"jvpipe.models.{workload.name}").logits_function(config)
    data = workload.open_data(None, folder, 0, workload.batch_size)
    read, references = zip(*open_parallel(None, config.languages).held_out, strict=True)
    written = translate(
        logits, params, open_tokenizer(folder, [], config.vocabulary), read, tokens=config.tokens
    )
    return {
        "perplexity": (math.exp(data.baseline_loss), perplexity(logits, params, data.held_out)),
        "BLEU": (bleu(read, references), bleu(written, references)),
    }
