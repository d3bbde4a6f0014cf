"""Recall and state tracking on synthetic sequences: which attention can do what.

    python -m enwik8.synthetic --out results/synthetic

`tasks` makes the sequences, `train` trains one small model on one task, `grid` runs all cells of a
table and can go on with it, `figure` draws it.
"""
