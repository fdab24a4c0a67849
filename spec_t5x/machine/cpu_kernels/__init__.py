"""Kernels for decoder steps on a CPU, compiled on the user's machine at first use.

Why they exist: a step of decoding reads every weight for a handful of rows, so memory
bounds it. XLA's CPU backend reads the weights of a 1-row product with one thread below some
size, and those of a product of 2 to 16 rows at about a third of the speed of memory; nothing
in a program or in XLA's flags changes that. The kernels (``decoder_kernels.cc``, XLA's foreign
functions) read them at the speed of memory with all threads, and do a layer's attention in one
call, since calls between small products take longer than these. They compute every row by the
same additions in the same order whatever the number of rows: verifying gamma + 1 tokens gives,
bit for bit, the logits of decoding them one by one.

* ``library``: compiles, loads and registers them; without a C++ compiler all is as before.
* ``calls``: what the networks call.
"""
