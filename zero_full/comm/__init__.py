"""Collectives: communicators, the lanes they run on, process groups, and the bytes they send."""
