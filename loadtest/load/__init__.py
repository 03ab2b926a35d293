"""Decides when requests are sent: queues, rates, the levels of a sweep, and how a run ends."""
