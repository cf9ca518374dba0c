"""What layers, tensors and links cost, measured or estimated."""
