"""Writes plans in the formats of other systems and reads plans from these formats."""
