"""Which of torch's attention kernels run on a GPU."""

import torch


def leave_out_cudnn(device: torch.device) -> None:
    """Let torch choose among the kernels that take any shape as it comes, in the whole process.

    On a Hopper or Blackwell GPU torch would take cuDNN's first, which plans each new shape on the
    host, for tens of milliseconds. Prompts and batches have new shapes all the time.

    Source: torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
    check_prefer_cudnn_attention; aten/src/ATen/native/cudnn/MHA.cpp, MHAParams.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
