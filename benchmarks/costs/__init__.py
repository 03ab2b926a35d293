"""What a text costs beside the model's products: CPU time by part, and latency by hop."""
