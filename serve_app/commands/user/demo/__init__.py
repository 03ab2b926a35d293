"""`raystream demo`: a replica is killed while it answers, and the answers are as if it were not."""
