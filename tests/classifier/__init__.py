"""Tests of `deployments.classifier`: no Ray, no HTTP."""
