"""`POST /v1/classify` and `POST /classify`."""
