"""The HTTP face of an engine (aiohttp): routes of docs/contracts.md."""
