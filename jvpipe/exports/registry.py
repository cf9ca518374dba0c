"""All formats, by name: `Plan.export` finds them, which knows nothing of this floor."""

from jvpipe.exports.format import Format
from jvpipe.exports.jaxpp import JAXPP
from jvpipe.exports.maxtext import MAXTEXT
from jvpipe.exports.megatron import MEGATRON
from jvpipe.exports.torch_csv import TORCH_CSV
from jvpipe.exports.torchtitan import TORCHTITAN
from jvpipe.ir.plan import EXPORTS
from jvpipe.util.names import did_you_mean

FORMATS = {each.name: each for each in (MEGATRON, TORCHTITAN, TORCH_CSV, MAXTEXT, JAXPP)}
EXPORTS.update({name: each.export for name, each in FORMATS.items()})


def find_format(name: str) -> Format:
    """The format of that name."""
    if name not in FORMATS:
        raise ValueError(did_you_mean("format", name, list(FORMATS)))
    return FORMATS[name]
