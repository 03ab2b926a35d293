"""Fuses chains of small operators in a traced graph, each into one kernel."""
