"""Comparisons that README and docs show, one command each."""
