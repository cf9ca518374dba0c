"""Reads files that describe the cost of a model, operator by operator, for planning without it."""
