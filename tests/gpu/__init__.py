"""Tests of `deployments.gpu`: arithmetic, and fakes in the place of devices."""
