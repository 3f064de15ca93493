"""What reading a config.json raises, and asking what fits."""


class FitError(ValueError):
    """There can be no answer; the text names the key or the option, and says what to do."""
