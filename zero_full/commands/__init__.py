"""The commands of `python -m zero_full`, a file each; `zero_full.__main__` lists them.

Their arguments are described where torch may be missing: so a command imports what it runs when it runs.
"""
