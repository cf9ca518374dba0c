"""Programs: layers and optimizers as functions that are compiled."""
