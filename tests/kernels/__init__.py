"""The compiled operators: each against its reference, on every instruction set and number of threads."""
