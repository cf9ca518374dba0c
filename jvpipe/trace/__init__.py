"""Traces a loss function, and cuts it into the layers of a `LayerGraph`."""
