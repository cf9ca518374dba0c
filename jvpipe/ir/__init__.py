"""Plain data that every other part reads: layers, plans, tasks, buffers."""
