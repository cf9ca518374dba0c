"""Plain data for all other folders: layers, plans, tasks, rows and buffers."""
