"""Measurements side by side with what people would use instead. Each prints a table and writes JSON."""
