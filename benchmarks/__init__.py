"""Speed and memory beside what a user would pick instead; see README.md in this folder.

python -m benchmarks.attention      the causal product and the whole attention, over length
python -m benchmarks.decode         a token at a time, over context
python -m benchmarks.train          a whole training step of a language model
"""
