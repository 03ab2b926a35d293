"""The memory plan: what a model, its keys and values and its graphs take before it is loaded.

It knows neither Ray nor torch.
"""
