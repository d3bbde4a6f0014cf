"""The experiment: byte-level language models with and without rotary positions.

Everything is reached through ``python -m enwik8``:

``prepare``   fetches or checks a corpus and shows what is in it.
``train``     trains one arm (a row of ``methods.py``) into a run folder.
``compare``   trains several arms with equal data, initial values and tokens, and draws them.
``plot``      draws the curves again, from the files alone.
``sample``    writes text with a trained model.
``evaluate``  measures bits per byte of a trained model on a split or a file.

``--objective mlm`` trains encoders that fill in hidden bytes instead (``masked.py``).
"""
