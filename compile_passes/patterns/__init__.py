"""Recognisers: small functions, one per spelling, that compose into an `MoEMatch`.

They read `reading.Reading` and change nothing. Each returns its part, None for "not this spelling, try the next",
or a `Refusal` for "this is an MoE block and here is why it cannot be replaced".
"""
