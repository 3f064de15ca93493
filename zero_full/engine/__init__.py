"""The engine: one training step out of micro-batches; its parts save, report, stop and load data."""
