"""The error that ends a stream."""

from deployments.contract.errors import RaystreamError
from serve_app.http.errors import error_payload
from serve_app.streaming.sse import LastEvent, encode_json, encode_typed


def error_event(error: RaystreamError) -> LastEvent:
    """Return the last event of a stream that has failed, in the shape of the request's API."""
    payload = error_payload(error)
    return LastEvent((encode_typed if "type" in payload else encode_json)(payload))
