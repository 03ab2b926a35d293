"""The error for a model that can't be served."""


class UnsupportedModelError(ValueError):
    """The model can't be served; the message names the feature or file at fault."""
