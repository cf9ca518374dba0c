"""Programs: the functions of layers and optimizers that XLA compiles."""
