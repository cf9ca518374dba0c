"""The table of all formats by name.

Importing this file fills the table of `Plan.export`, because jvpipe/ir must not import this folder.
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
    """Returns the format of a name; raises ValueError that lists all names for an unknown one."""
    if name not in FORMATS:
        raise ValueError(did_you_mean("format", name, list(FORMATS)))
    return FORMATS[name]
