"""Ray Train with zero_full's example."""
