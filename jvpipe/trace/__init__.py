"""Traces a loss function into a LayerGraph."""
