"""Studies: many arms, seeds and settings as one declarative file, run, resumed and reported.

``plan`` reads and checks the file, ``runner`` does what it says, ``queue`` and ``worker`` train,
``results`` and ``tables`` turn the runs' files into numbers, ``figures`` and ``report`` into pages.
"""
