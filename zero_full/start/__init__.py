"""How a run begins: read the launcher, check arguments, compare ranks, translate a configuration."""
