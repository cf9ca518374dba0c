"""Shows a run: console, metrics, timeline."""
