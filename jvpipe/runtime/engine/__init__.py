"""The engine that runs lowered rows: controller, counts of bytes, processes and measurements."""
