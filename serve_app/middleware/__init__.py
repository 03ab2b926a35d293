"""The middleware that a request passes through before it reaches a surface."""
