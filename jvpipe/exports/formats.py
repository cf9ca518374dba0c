"""Lists all formats by name; new formats must be added here.

`Plan.export` needs the formats, too, but jvpipe/ir must not import this folder. So importing this
file adds the formats to the table `EXPORTS` of jvpipe/ir/plan.py.
"""

from jvpipe.exports.format import Format
from jvpipe.exports.jaxpp import JAXPP
from jvpipe.exports.maxtext import MAXTEXT
from jvpipe.exports.megatron import MEGATRON
from jvpipe.exports.torch_csv import TORCH_CSV
from jvpipe.exports.torchtitan import TORCHTITAN
from jvpipe.ir.plan import EXPORTS
from jvpipe.util.names import did_you_mean

FORMATS = {fmt.name: fmt for fmt in (MEGATRON, TORCHTITAN, TORCH_CSV, MAXTEXT, JAXPP)}
EXPORTS.update({name: fmt.export for name, fmt in FORMATS.items()})


def find_format(name: str) -> Format:
    """Returns the format with a name; if there is none, raises ValueError with all names."""
    if name not in FORMATS:
        raise ValueError(did_you_mean("format", name, list(FORMATS)))
    return FORMATS[name]
