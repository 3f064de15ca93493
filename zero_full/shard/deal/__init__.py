"""Layout of a model: assign its parameters to flat buffers, units and offload tiers."""
