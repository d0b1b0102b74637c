"""Data: convert text to token files, and token files to batches.

`tokenizer.py` converts text to ids and back. `chat_template.py` and `rows.py` convert conversations and columns to documents.
`documents.py` and `prepare.py` convert corpora to token files in parallel processes. `tokenfile.py` defines the file format.
`stdlib.py` and `synthetic.py` are the two sources that need no preparation. `opening.py` opens the files that a config names.
`mixture.py` decides the source of each row. `windows.py` converts rows of tokens to arrays. `batches.py` makes batches as a
pure function of (seed, step).
"""
