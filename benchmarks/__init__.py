"""Benchmarks of MoE layers (`python -m benchmarks`), of whole models (`e2e`), and their report (`report`)."""
