"""The device: its memory and cores, the few calls that bound them, and what is used of them."""
