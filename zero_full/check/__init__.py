"""What `python -m zero_full check` says of a configuration, by the rules of the engine."""
