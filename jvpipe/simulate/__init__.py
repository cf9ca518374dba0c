"""Simulation: predicts the seconds and bytes of a run, from its rows or from lists of tasks."""
