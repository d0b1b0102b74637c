"""The supervisor that run.sh starts for training: provenance, preflight, attempts on one or several nodes, restarts.

The supervisor imports only the standard library, so that it starts at once.
"""
