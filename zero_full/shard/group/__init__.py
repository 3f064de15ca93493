"""What is sharded: flat parameters, their gradients and their master weights, over a process group."""
