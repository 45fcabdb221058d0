# SPDX-License-Identifier: BSD-3-Clause
"""Data sets in their official formats, and mini-batches of them that can be drawn again.

`files` finds a file of a data set or fetches it from where its owners offer it; one module for each
data set reads them into tensors; `draws` says which samples a worker's mini-batch has, `augment`
how they are changed. All of it follows from arguments: nothing here reads the environment, and the
same arguments give the same bits.
"""
