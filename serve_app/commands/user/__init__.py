"""Programs for people: chat, demo, downloads, keys and what is installed."""
