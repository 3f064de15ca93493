"""The commands of `python -m zero_full`, one file each. `zero_full.__main__` lists them.

A command imports its implementation only when it runs, so that help is available without torch.
"""
