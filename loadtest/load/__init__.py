"""When requests are sent: queues, rates, levels of a sweep, and how all of it ends."""
