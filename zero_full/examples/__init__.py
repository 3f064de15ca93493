"""Scripts to start from."""
