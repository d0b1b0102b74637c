"""Data: text to token files, token files to batches.

`tokenizer.py` text <-> ids; `tokenfile.py` the file format; `prepare.py` corpora to token files; `stdlib.py` and
`synthetic.py` the two sources that need no preparation; `windows.py` rows of tokens to arrays; `pipeline.py` batches as a
pure function of (seed, step).
"""
