"""Checks a node before a run: expected and actual state, why it matters, and how to fix it.

`node.py` reads the node, or a recording of it. `table.py` has the form of the checks. gpus.py, links.py, software.py, host.py
and rates.py have the checks, and `inspection.py` runs them. `measure.py` measures GPUs and disks for some seconds. jax is
imported only to measure, and to connect to the other processes of a run.
"""
