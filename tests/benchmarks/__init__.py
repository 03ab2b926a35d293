"""Tests of `benchmarks`: that they run and that they add up, not how fast anything is."""
