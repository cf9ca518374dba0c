"""jvpipe's own planner: searches cuts, fates, orders of tasks and shapes of pipelines."""
