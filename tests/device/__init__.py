"""Tests of `deployments.device`: arithmetic, and fakes in place of devices."""
