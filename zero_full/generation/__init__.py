"""Generation from a sharded model, and its weights for an inference server.

generating.py   gather once, generate, release
budget.py       how many bytes to keep gathered
adapters.py     merge LoRA adapters, and restore the base weights bit for bit
weights.py      iterate over whole tensors in buckets
buckets.py      the plan of the buckets, and their collectives
deltas.py       hand over only the elements that steps have changed
"""
