"""The channel between an ingress and a replica: the deltas of all their streams, over one socket.

The replica listens; each ingress connects once and then only reads. Ray's calls carry everything
else: requests, acceptance, cancellation and the end. This package knows no Ray.
"""
