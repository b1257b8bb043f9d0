"""The experiment: which recipe runs on which step, what is watched while it does, and how everything is put back.

Knows no Trainer: it calls `step()`.
"""
