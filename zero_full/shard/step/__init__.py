"""The optimizer's step: agree on the gradients, decide, update what this rank owns, publish."""
