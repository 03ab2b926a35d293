"""`POST /score` and `/v1/score`: say how well texts fit together."""
