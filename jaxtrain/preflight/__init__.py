"""Is this node fit to train? What was expected of it, what was seen, why it matters and how to put it right.

`machine.py` is all that touches the node: commands, files, limits. What it answers can be written down (`--record`) and judged
elsewhere (`--recorded`), so that broken nodes are inputs of tests. The checks read nothing but that. `measure.py` and
`device_work.py` run GPUs and disks for some seconds, and `judge.py` says what to think of the figures. No jax here but in the
processes that measure, and to meet the other nodes of a run.
"""
