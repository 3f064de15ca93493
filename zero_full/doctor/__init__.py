"""What `python -m zero_full doctor` tells about this machine, and how fast it moves data."""
