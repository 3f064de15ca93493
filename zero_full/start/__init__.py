"""The start of a run: read the launcher, check arguments, compare ranks, translate a configuration."""
