"""Plain data that all other folders except util read: layers, plans, tasks, rows, buffers."""
