"""Grammars that constrain an answer: `response_format` and strict tools."""
