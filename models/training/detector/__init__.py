"""Trains pydoc-detector, which tells pydoc-chat's text from documentation that people wrote.

The way through: ``human_documents`` reads people's texts and ``sampled_documents`` samples
pydoc-chat's; each ``document`` is on one side of the split into training and evaluation; ``pieces``
cuts and balances them; ``architecture`` builds an untrained model; ``train`` trains it;
``evaluate`` examines what ``detector`` loads and compares it with ``baseline``.
"""
