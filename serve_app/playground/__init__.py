"""The page at `/`: chat, classification, search and a live view of the replicas."""
