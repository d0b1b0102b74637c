"""Data: text to token files, token files to batches.

`tokenizer.py` text <-> ids; `template.py`, `rows.py` conversations and columns to documents; `readers.py`, `prepare.py` corpora
to token files, in processes; `tokenfile.py`, `checked.py` the file format; `stdlib.py` and `synthetic.py` the two sources that
need no preparation; `mixture.py` weights of sources; `windows.py` rows of tokens to arrays; `pipeline.py` batches as a pure
function of (seed, step).
"""
