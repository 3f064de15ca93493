"""What watches for changes by user code that a step would ignore."""
