"""What users do without having read the docs: equal to plain torch, or an error that names the thing.

`python -m tests.hostile` prints the whole matrix as a table.
"""
