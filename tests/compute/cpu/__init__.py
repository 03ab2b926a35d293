"""Tests of what makes a stock model fast on a CPU."""
