"""The embedded models: a folder of weights each, and the scripts that made them in ``training``."""
