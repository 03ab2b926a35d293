"""`raystream demo`: a replica is killed, or a stream parked, and its answer is the same."""
