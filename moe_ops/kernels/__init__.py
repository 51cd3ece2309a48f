"""Device kernels, one folder per language. Importing this package imports none of them."""
