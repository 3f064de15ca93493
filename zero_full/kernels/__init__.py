"""Compiled operators: csrc/ built and loaded, with a reference in plain torch for each operator.

This file imports nothing, so that `build` can be used without torch.
"""
