"""Contents of state dicts and checkpoints: ranges of named tensors, and one rank's part of the state."""
