"""Models that jvpipe trains from the command line, each with its data and its recipe."""

from jvpipe.models.workload import Batches, Data, Workload, load

__all__ = ["Batches", "Data", "Workload", "load"]
