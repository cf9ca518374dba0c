"""The lowering of streams without a flush: versions of the weights, and steps that repeat."""
