"""Reports of plans and runs, as text, tables, metrics, timelines and figures, and to trackers."""
