"""The sharded optimizer step: agree across ranks, decide, update this rank's slices, all-gather them."""
