"""Tests of `deployments.engine`: no Ray, no HTTP."""
