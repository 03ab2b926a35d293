"""Designs that people build by hand around a model, written anew: what the project replaces.

Each takes the model as a function from texts to results, so that all run the same model in the same
run, and a test can give them a model of its own.
"""
