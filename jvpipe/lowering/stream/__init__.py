"""What a stream without a flush adds to lowering: versions of the weights, and steps that repeat."""
