import pytest

from serve_app import app
from serve_app.config import AuthConfig


def test_a_ray_without_token_is_refused_and_public_http_is_no_consent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "is_token_auth_enabled", lambda: False)
    with pytest.raises(app.UnauthenticatedRayError, match="RAY_AUTH_MODE=token"):
        app.require_ray_token(AuthConfig(allow_anonymous=True))
    app.require_ray_token(AuthConfig(allow_unauthenticated_ray=True))


def test_a_ray_with_a_token_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "is_token_auth_enabled", lambda: True)
    app.require_ray_token(AuthConfig())
