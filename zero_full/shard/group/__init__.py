"""Parameter groups: flat parameters, gradients and master weights, sharded over a process group."""
