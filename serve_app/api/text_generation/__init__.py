"""`POST /text-generation`."""
