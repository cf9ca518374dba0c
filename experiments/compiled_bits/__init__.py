"""Whether the compilers of GPUs and TPUs make a layer's values the same way under all fates."""
