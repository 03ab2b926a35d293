"""API keys and the accounts of what they use."""
