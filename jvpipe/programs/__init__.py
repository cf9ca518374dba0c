"""Layers and optimizers as compiled programs."""
