"""The ZeRO runtime: sharded parameters, gradients and optimizer state. Each package imports those below it.

access     access for user code: whole parameters, optimizer state, gradients, memory in use
step       the sharded optimizer step: agree across ranks, decide, update this rank's slices, all-gather
contents   contents of state dicts and checkpoints
guards     checks for changes by user code that a step would ignore
deal       layout: assign parameters to flat buffers, units and offload tiers
passes     forward and backward: all-gather and release parameters, reduce gradients
group      parameter groups: flat parameters, gradients and master weights
"""
