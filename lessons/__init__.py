"""The staircase: one folder a step with text, hints and an experiment; exercises come from zero_min."""
