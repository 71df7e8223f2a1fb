"""Thin adapters: one outside system a file. They translate, call, and return a record; no torch here."""
