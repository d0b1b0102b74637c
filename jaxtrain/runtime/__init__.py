"""The supervisor that run.sh starts for training: provenance, preflight, attempts on one or several nodes, restarts.

The supervisor imports only the standard library, because it runs next to every run and must start at once.
"""
