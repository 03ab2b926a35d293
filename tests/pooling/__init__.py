"""Tests of `deployments.pooling`: no Ray, no HTTP."""
