"""The engine: one training step out of micro-batches, with parts that log, stop at signals and load data."""
