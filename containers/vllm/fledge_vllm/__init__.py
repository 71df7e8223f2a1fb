"""Runs inside vLLM's environment only; nothing else of Fledge is importable there."""
