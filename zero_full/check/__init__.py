"""The command `python -m zero_full check`: validate a configuration by the rules of the engine."""
