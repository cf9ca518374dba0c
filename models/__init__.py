"""Models that jvpipe trains from the command line, each with its data and its training recipe."""

from jvpipe.models.protocol import Model
from jvpipe.models.workload import NAMES, Batches, Data, Workload, load, sizes

__all__ = ["NAMES", "Batches", "Data", "Model", "Workload", "load", "sizes"]
