"""The HTTP server: requests in, Server-Sent Events out, and the root that composes the graph.

Ray puts the working directory before all else that its processes import from, unless `raystream
serve` starts them. A package `deployments` there is refused in one line, which Serve shows.
"""

from pathlib import Path

import deployments

_OWN = Path(__file__).parents[1] / "deployments" / "__init__.py"
if deployments.__file__ != str(_OWN):
    from ray.serve.exceptions import RayServeException  # too much to import where all is well

    class HiddenPackageError(ImportError, RayServeException):
        """Serve shows the text of its own errors without a traceback."""

    raise HiddenPackageError(
        f"{deployments.__file__} hides raystream's own package 'deployments': rename it, or start "
        "Ray from another folder"
    )
