# SPDX-License-Identifier: BSD-3-Clause
"""Data sets in their official formats, and mini-batches that can be drawn again.

`download` finds a file of a data set, or fetches it from its official source; one module per data
set reads the files into tensors; `sampling` chooses the samples of each mini-batch; `augment`
changes them. Everything follows from the arguments: nothing here reads the environment, and the
same arguments give the same bits.
"""
