"""What state dicts and checkpoints hold of a sharded model and its optimizer."""
