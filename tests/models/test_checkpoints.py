"""A folder gives the model that it holds, whatever the size whose recipe it takes."""

import json
from pathlib import Path

import pytest

from jvpipe.models import workload
from jvpipe.models.weight_folder import Folder
from jvpipe.models.weights import read_fields
from tests.models.test_weights import MODELS, WEIGHTS

SIZES = {
    f"{module.__name__} {size}": config
    for module in MODELS.values()
    for size, config in module.SIZES.items()
}


@pytest.mark.parametrize("name", MODELS)
def test_no_field_of_a_folder_depends_on_the_size(name: str) -> None:
    told = json.loads((WEIGHTS / name / "config.json").read_text())
    told.pop("rope_parameters", None)  # the usual angles, which config.json may omit
    model, kind = workload.OF_FOLDERS[told["model_type"]], type(MODELS[name].SIZES["tiny"])
    # The sizes of relatives differ the most.
    sizes = {size: config for size, config in SIZES.items() if type(config) is kind}
    read = read_fields(Folder(Path(), told, {}), workload.format_of(model))
    first, *others = (workload.configured(model, sizes, size, read) for size in sizes)
    assert others == [first] * (len(sizes) - 1)
