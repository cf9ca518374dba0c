"""Planners: `joint/` searches for plans, `model/` counts their seconds and bytes."""
