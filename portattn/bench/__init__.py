"""Speed as a ratio: every contender of a run is timed in turn, in one process, on the same arrays.

Absolute times drift with the machine; the ratio within one run is what is reported.
"""
