"""The conformance suite: what "exact", "head dim 256" and "memory behaviour" mean, in numbers, for
any attention kernel.

The rule kept here: theory (`reference`, `bounds`, `judge`), questions (`checks`) and engine
(`isolate`, `runner`, `record`) know nothing of one another's insides; `case` holds the words that
they share.
"""
