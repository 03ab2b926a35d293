"""Commands that judge a configuration, a model or a machine before anything starts."""
