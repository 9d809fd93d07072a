"""Faces for applications that already speak another library's attention call.

- `portattn.compat.sdpa`: torch's ``scaled_dot_product_attention``
- `portattn.compat.flash_attn`: flash-attention 2's functions
- `portattn.compat.transformers`: the name ``portattn`` in transformers' attention interface

The rule kept here: every argument of the other call is mapped exactly or refused; none is ignored.
Importing this package imports nothing; each module imports its own library.
"""
