"""The demo: a small real target, two domains of prompts, and the whole pipeline on a laptop's CPU."""
