"""HTTP parts that every layer above shares: errors, JSON bodies, request ids, request records."""
