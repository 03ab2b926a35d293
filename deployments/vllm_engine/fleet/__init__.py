"""Servers of vLLM that somebody else runs: what is said to one of them, and an engine of all."""

from deployments.vllm_engine.fleet.engine import FleetEngine
from deployments.vllm_engine.fleet.server import API_KEY

__all__ = ["API_KEY", "FleetEngine"]
