"""What the server and the replicas share: requests, events, errors, entries, formats and names.

It knows neither Ray nor torch.
"""
