"""Reports of plans and runs: words, tables, lines, metrics, timelines, figures and trackers."""
