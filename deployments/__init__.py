"""The Serve deployments that run on the GPUs: thin shells around the engine and the classifier."""

import time
from typing import Final

IMPORT_BEGAN_S: Final = time.time()
"""When this process began to import deployments, in Unix seconds; see `start_phases`."""
