"""The supervisor that run.sh starts for training: provenance, preflight, attempts on one or several nodes, restarts.

It imports the standard library alone, because it waits beside every run and must start at once.
"""
