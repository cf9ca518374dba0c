"""Reads files with the measured costs of a model's operators, to plan without the model's code."""
