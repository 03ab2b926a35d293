"""What a process says of itself: metrics, memory, its start and spans."""
