"""Access to a sharded model for user code: whole parameters, optimizer state, gradients, memory in use."""
