"""Pipeline-parallel training for JAX: trace a loss, cut it, run it over several devices."""

import jvpipe.exports.registry  # noqa: F401 - what Plan.export knows
from jvpipe.ir.deferred import BatchStatistics, deferred_batch_norm
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.plan import Plan
from jvpipe.ir.weighted import Weighted
from jvpipe.pipeline import Pipeline
from jvpipe.replay import replay
from jvpipe.report.trackers import Tracking
from jvpipe.runtime.checkpoints.checkpoint import checkpoint_extra
from jvpipe.runtime.checkpoints.saving import checkpoint_plan
from jvpipe.runtime.failures import HostLost, StageError
from jvpipe.runtime.state import State
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.session.forecasts import Forecast, plan_for

__version__ = "0.1.0"

__all__ = [
    "BatchStatistics",
    "Forecast",
    "HostLost",
    "LazyArray",
    "MemoryLimitExceeded",
    "Pipeline",
    "Plan",
    "StageError",
    "State",
    "Tracking",
    "Weighted",
    "__version__",
    "checkpoint_extra",
    "checkpoint_plan",
    "deferred_batch_norm",
    "plan_for",
    "replay",
]
