"""The flight recorder: writes each rank's last steps to disk as they happen.

recorder.py    records one rank's collectives, passes, steps and memory
black_box.py   writes its events to two files of bounded size
rank_files.py  reads the files of all ranks
timeline.py    merges the ranks' events into one recording: clocks, matching calls and waiting times
captions.py    describes a moment of a recording in a sentence
picture.py     prints a recording as text: `python -m zero_full replay`
"""
