"""The embedded models: a folder of weights each, and the scripts in ``training`` that made them."""
