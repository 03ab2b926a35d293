"""Finds the sequence that breaks a step and ends only that one."""
