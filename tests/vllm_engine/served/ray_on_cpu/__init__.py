"""What has vLLM's CPU build run on GPUs that Ray only counts."""
