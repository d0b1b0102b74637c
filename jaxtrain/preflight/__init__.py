"""Checks a node before a run. Each check has an expected and an actual state, a reason and a fix.

node.py reads the node, or a recording of the node. table.py defines the structure of a check. gpus.py, links.py, software.py,
host.py and rates.py define the checks, and inspection.py runs them. measure.py measures GPUs and disks for some seconds. jax is
imported only to measure, and to connect to the other processes of a run.
"""
