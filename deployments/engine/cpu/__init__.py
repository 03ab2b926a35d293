"""What makes a stock model fast on a CPU: the same arithmetic on weights laid out for it."""
