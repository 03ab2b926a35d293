"""Where fused operators equal torch's to the last bit."""

from typing import Final

import pytest

from deployments.plan.processor import features

IS_EXACT: Final = bool(features().get("avx2"))
"""Without AVX2, torch adds in another order and takes another exponential. A replica compares the
logits when it starts, and does not fuse what differs by more than rounding."""

exact = pytest.mark.skipif(not IS_EXACT, reason="torch computes otherwise without AVX2")
