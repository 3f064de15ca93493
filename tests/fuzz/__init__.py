"""A random search for steps that differ from plain torch: see `__main__.py`."""
