"""The costs of layers, tensors and links, measured or estimated."""
