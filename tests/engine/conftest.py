from tests.engine.shared_traces import shared_traces

__all__ = ["shared_traces"]
