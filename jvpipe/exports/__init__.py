"""Writes plans in the formats of other systems, and reads plans in these formats."""
