"""`make gpu-day`: all that needs a GPU, in parts of a few minutes; `--rehearse` runs the same on a CPU.

A part is a command of its own. Each line that it prints and that is a JSON object is a row of its result, so
what a part has found before it was ended is kept. `run.py` runs parts and keeps results, and imports neither
torch nor anything that a bare machine lacks; `page.py` makes the site's page of them.
"""
