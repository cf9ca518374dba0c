"""From a loss function to a LayerGraph."""
