"""Guards: checks for changes by user code that a step would ignore."""
