"""Parts of OpenAI's API that several surfaces share."""
