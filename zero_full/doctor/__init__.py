"""The command `python -m zero_full doctor`: report on this machine, and measure its bandwidths."""
