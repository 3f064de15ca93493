"""Compiled operators: csrc/ built and loaded, and beside each operator what it means in plain torch.

Nothing is imported here, so that `build` can be used without torch.
"""
