"""Forward and backward: when parameters are gathered and released, and gradients reduced."""
