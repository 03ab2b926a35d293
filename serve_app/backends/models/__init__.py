"""What is known of each model: its state, description and devices, and how it wakes."""
