# SPDX-License-Identifier: BSD-3-Clause
"""The papers' experiments: real models on real data, trained in virtual time.

Gradients are real and computed in one process, in the order and with the staleness that a simulated
schedule dictates, so that a cluster of any size and slowness can be tried on a laptop. Besides
`run` this is the only room that imports torch; nothing but the command line imports it.
"""
