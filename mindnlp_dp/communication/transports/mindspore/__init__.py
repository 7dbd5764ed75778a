"""MindSpore's own libraries: the transport, its collective calls, the cluster of its processes, and their scheduler."""
