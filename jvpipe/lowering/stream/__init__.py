"""The lowering of streams: training without a flush, with weight versions and repeating steps."""
