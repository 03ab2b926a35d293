"""Tests of the deployments as plain classes, without a Ray cluster."""
