"""Layers over several processes: every process runs the same list of checks, and each check is one test."""
