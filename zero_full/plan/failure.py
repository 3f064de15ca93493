"""What a plan raises."""


class PlanError(ValueError):
    """There can be no plan; the text says why and what to do."""
