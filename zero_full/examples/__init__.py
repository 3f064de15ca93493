"""Example training scripts to start from."""
