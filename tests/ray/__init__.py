"""Tests on a real Ray: real HTTP, real replicas, real placement."""
