"""Finds chains of small operators in a traced graph, and replaces each by one call."""
