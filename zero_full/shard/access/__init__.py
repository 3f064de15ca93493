"""What users read and write of a sharded model: whole parameters, state, gradients, bytes held."""
