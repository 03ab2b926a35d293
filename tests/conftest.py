import torch
from hypothesis import HealthCheck, settings

# The models in the tests are so small that a second thread only waits for the first.
torch.set_num_threads(1)

# How long an example takes, and to draw it, is the machine's business; what it gives is ours.
settings.register_profile("raystream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("raystream")
