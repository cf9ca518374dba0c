"""Pipeline-parallel training for JAX: trace a loss, cut it, run it over several devices."""

import jvpipe.exports.formats  # noqa: F401 - registers the formats of Plan.export
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.ir.plan import Plan
from jvpipe.ir.weighted import Weighted
from jvpipe.pipeline import Pipeline
from jvpipe.replay import replay
from jvpipe.report.trackers import Tracking
from jvpipe.runtime.engine.failures import HostLost, StageError
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.runtime.engine.training_state import State
from jvpipe.runtime.state.checkpoints.checkpoint import checkpoint_extra
from jvpipe.runtime.state.checkpoints.saving import checkpoint_plan
from jvpipe.session.forecast import Forecast
from jvpipe.session.forecasts import plan_for
from jvpipe.trace.deferred import BatchStatistics, deferred_batch_norm

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
