"""Models whose layers others timed, forward and backward, on one V100 with PyTorch.

VGG-16 and ResNet-50, batches of 128: msr-fiddle/pipedream, profiler/image_classification/profiles
(MIT). BERT-24, 8 records of 128 tokens: msr-fiddle/dnn-partitioning, throughput-inputs/LayerGraphs
(MIT). Neither says on which device; a ReLU of VGG-16 reads and writes 654 GB/s, which only a V100
did then.
"""

from collections.abc import Mapping

from experiments.predicts.layers import layers_of, run_by
from jvpipe.cost.families import PYTORCH
from jvpipe.cost.presets import V100

MODELS: Mapping[str, tuple[str, str, int]] = {
    "vgg16": ("vgg", "16", 128),
    "resnet50": ("resnet", "50", 128),
    "bert24": ("bert", "large published=1", 8),
}


def predicted(name: str) -> float:
    """Predicts the examples per second of a model."""
    model, size, examples = MODELS[name]
    layers = layers_of(model, size, examples, run_by(PYTORCH, V100))
    return examples / sum(layer.seconds for layer in layers)
