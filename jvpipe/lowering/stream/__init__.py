"""The lowering of streams, which train without a flush: weight versions, and steps that repeat."""
