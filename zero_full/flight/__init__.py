"""The flight recorder: what every rank did in its last steps, on disk while it happens.

recorder.py   listens to one rank's collectives, passes and steps
black_box.py     takes its events to disk, a bounded number of them
parts.py      finds and reads what the ranks have left
clocks.py     brings the ranks' clocks together
timeline.py   makes one recording of all ranks: which call met which, who waited for whom
picture.py    prints a recording
"""
