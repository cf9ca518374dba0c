"""The engine that runs lowered rows: its controller, counts of bytes, processes and measurements."""
