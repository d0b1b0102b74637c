"""A run of several processes: its description, its connection, and the messages between its processes.

`detect` (cluster.py) reads options and the environment; it starts nothing and imports no JAX. `connect` (service.py) connects
this process to JAX's coordination service before JAX's devices are used. `agree` (agreement.py) refuses the run on all
processes, if their devices differ or one of them has found a problem. `Peers` (peers.py) exchanges messages through the
service's key-value store in process 0, and never through the devices. So messages arrive even while the training loop is
blocked in a collective that another process has not begun.
"""

from jaxtrain.runtime.agreement import agree
from jaxtrain.runtime.cluster import FIELDS, Cluster, all_devices, detect
from jaxtrain.runtime.peers import PeerLost, Peers, leave
from jaxtrain.runtime.service import ClusterError, connect

__all__ = ["FIELDS", "Cluster", "ClusterError", "PeerLost", "Peers", "agree", "all_devices", "connect", "detect", "leave"]
