"""Writes plans in the formats of other systems, and reads plans from them; one file per format."""
