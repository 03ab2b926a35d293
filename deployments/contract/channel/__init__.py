"""The channel's messages, and how both of its ends encrypt it."""
