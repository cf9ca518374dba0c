"""Simulation: predicts the seconds and bytes of a run from the lists that the controller reads."""
