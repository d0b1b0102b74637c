"""A run of several processes: who says so (cluster.py), how they meet (meeting.py), and what they tell each other (peers.py).

`detect` reads options and the environment; it starts nothing and imports no jax. `start` connects this process to the others
before JAX is used. `Peers` speaks through jax's coordination service, a key-value store in process 0, and never through the
devices: it works while the training loop is blocked in a collective that another process has not begun, or never will.

Where a peer dies, jax leaves the survivors in their collective, or with its error, and aborts them with SIGABRT (exit code 134)
after 100 s. Where process 0 dies, and the store with it, jax aborts them at once, and no setting prevents that: its own
callback for this cannot be called from Python (jaxlib 0.11.2). `Peers.watch` is there sooner in both cases. Only where it is
not watching yet, or any more, and where something else handles SIGABRT (faulthandler), does the death of process 0 end the
others with 134.
"""

from jaxtrain.distributed.cluster import FIELDS, Cluster, all_devices, detect
from jaxtrain.distributed.meeting import ClusterError, start
from jaxtrain.distributed.peers import PeerLost, Peers, leave

__all__ = ["FIELDS", "Cluster", "ClusterError", "PeerLost", "Peers", "all_devices", "detect", "leave", "start"]
